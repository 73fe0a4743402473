import os
import sys
from pathlib import Path

# Tests fork, which a pool of threads does not survive; and two workers with a thread each are quicker than with two.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
