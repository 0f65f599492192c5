"""`python -m unisono`: the same as the console script."""

from unisono.launcher.cli import main

if __name__ == "__main__":
    main()
