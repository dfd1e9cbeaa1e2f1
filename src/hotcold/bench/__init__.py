"""`hotcold bench`: where a step's time goes, beside the least that its arithmetic can take on this machine."""
