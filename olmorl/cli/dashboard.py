"""`olmorl dashboard`: serve the page of a run, or of several laid over each other."""

import sys
from pathlib import Path

from olmorl.contract.errors import ConfigError


def serve(directories: list[Path], *, host: str, port: int) -> None:
    import uvicorn

    from olmorl.dashboard.server import dashboard_app

    app = dashboard_app(directories)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False)
    try:
        socket = config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason, which is nearly always this
        raise ConfigError(
            f"cannot listen on {host}:{port}; is another dashboard running? --port 0 takes a free one"
        ) from None
    shown = socket.getsockname()
    print(
        f"dashboard of {', '.join(map(str, directories))}: http://{host}:{shown[1]}  (Ctrl-C ends it)", file=sys.stderr
    )
    uvicorn.Server(config).run([socket])
