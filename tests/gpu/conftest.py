import pytest

from kernels_pallas.dispatch import unavailable_reason


@pytest.fixture(autouse=True)
def hopper():
    if reason := unavailable_reason():
        pytest.skip(reason)
