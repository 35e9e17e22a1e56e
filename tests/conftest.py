"""Settings of every test process. They must stand before torch is imported."""

import contextlib
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Prepared data of tests must not fill the user's cache.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mgrpo-tests-")

# A busy machine is slow, and no test asserts times. A GPU machine may lack the package.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("no_deadline", deadline=None)
    settings.load_profile("no_deadline")
