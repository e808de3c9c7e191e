"""``python -m optdnn.cli``."""

from optdnn.cli.main import main

main()
