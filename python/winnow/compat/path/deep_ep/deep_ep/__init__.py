"""What ``import deep_ep`` finds with this folder's parent on PYTHONPATH: winnow.compat.deep_ep."""

import sys

from winnow.compat import install

del sys.modules[__name__]  # this file, which the import gives up for what stands there afterwards
install("deep_ep")
