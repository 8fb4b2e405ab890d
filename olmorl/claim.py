"""One process at a time may write a place: two would each write what the other has written."""

import fcntl
import logging
from io import BufferedRandom
from pathlib import Path

from olmorl.contract.errors import ConfigError

log = logging.getLogger(__name__)


def claim(path: Path, *, refusal: str) -> BufferedRandom:
    """Lock the file `path`, which is made if it is not there, until what is returned is closed or this process ends.

    Raises ConfigError with `refusal` where another holds it. A file system without locks is warned of.
    """
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(refusal) from None
    except OSError as error:
        log.warning("%s cannot be locked (%s): see that nobody else writes there", path, error.strerror)
    return file
