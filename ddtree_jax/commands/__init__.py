"""The logic of the scripts in scripts/."""

import gc

# Start-up makes hundreds of thousands of objects that stay. To look for garbage among them as often
# as Python does by itself takes a tenth of the time to the first text.
gc.set_threshold(200_000, 50, 50)
