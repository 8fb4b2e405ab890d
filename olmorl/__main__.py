"""`python -m olmorl` is `olmorl`."""

from olmorl.cli.main import main

main()
