"""Settings common to all tests."""

import os

from hypothesis import HealthCheck, settings

# The matrices of the tests are small: a second thread would only wait, and long where the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples on every run, and no limit on the time of one example: the machine may be busy.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ci")
