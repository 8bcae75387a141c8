"""What ``import flash_mla`` finds with the folder around it on PYTHONPATH: winnow.compat's."""

import sys

from winnow.compat import install

del sys.modules[__name__]  # this file, which the import gives up for what stands there afterwards
install("flash_mla")
