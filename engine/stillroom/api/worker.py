"""The entry point of a run's process: `python -m stillroom.api.worker FOLDER`."""

import sys

from stillroom.api.operations import operation_of_run
from stillroom.jobs.worker import main, piped_secrets

if __name__ == "__main__":
    sys.exit(main(operation_of_run, piped_secrets()))
