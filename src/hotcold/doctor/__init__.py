"""`hotcold doctor`: what ails a run, and whether a recipe will work before hours are spent on it."""
