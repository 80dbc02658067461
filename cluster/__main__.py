"""`python -m swell.cluster` is the same as `swell`."""

import sys

from swell.cluster.cli.main import main

sys.exit(main())
