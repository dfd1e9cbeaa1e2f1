"""`python -m hotcold` is the `hotcold` command."""

from hotcold.cli import main

if __name__ == "__main__":
    main()
