"""Settings that CUDA reads when it starts."""

import os

# Ranks that are threads wait for each other on one GPU: a hardware queue for each stream.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
