"""`hotcold verify`: what the laboratory finds, for a reader."""
