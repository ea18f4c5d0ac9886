"""The tests. Threads that wait for others sleep meanwhile, from the first import of torch on: by default they spin for
as long as a time slice, and where several test runs share two cores they take these from whoever has work (the tests of
the optimizers took 30 s of processor time beside seven other runs, and 2.6 s with this).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
