"""``python -m optdnn``."""

from optdnn.cli.main import main

main()
