"""What stands between model-written code and this machine?"""

from collections.abc import Iterator

from olmorl.cli.finding import Finding
from olmorl.rewards.sandbox import sandbox_report
from olmorl.rewards.sandbox_walls import CLOSED

FIX = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces), or run as root with "
    "CAP_SYS_ADMIN, or use a code server (reward.code_api_url); it matters only to the verifiers code and code_stdio"
)


FIX_CLOSED = (
    "without namespaces programs run as another user, who must be able to read the interpreter: install Python and the "
    "virtual environment outside of the closed folder (/opt, say), or open the way to them (chmod o+x FOLDER); or "
    "allow namespaces, or use a code server (reward.code_api_url). It matters only to the verifiers code and code_stdio"
)


def check_sandbox(*, namespaces: bool | None = None) -> Iterator[Finding]:
    """`namespaces` None: as this machine allows."""
    walls = sandbox_report(namespaces=namespaces)
    open_walls = [wall for wall in walls if not wall.stands]
    for wall in open_walls:
        detail = f" ({wall.detail})" if wall.detail else ""
        fix = FIX_CLOSED if CLOSED in wall.detail else FIX
        yield Finding("warn", f"sandbox for model-written code: not enforced: {wall.what}{detail}", fix)
    if not open_walls:
        yield Finding("ok", f"sandbox for model-written code: all {len(walls)} walls stand")
