"""What stands between model-written code and this machine?"""

from collections.abc import Iterator

from olmorl.cli.finding import Finding
from olmorl.rewards.sandbox import sandbox_report

FIX = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces), or run as root with "
    "CAP_SYS_ADMIN, or use a code server (reward.code_api_url); it matters only to the verifiers code and code_stdio"
)


def check_sandbox() -> Iterator[Finding]:
    walls = sandbox_report()
    open_walls = [wall for wall in walls if not wall.stands]
    for wall in open_walls:
        detail = f" ({wall.detail})" if wall.detail else ""
        yield Finding("warn", f"sandbox for model-written code: not enforced: {wall.what}{detail}", FIX)
    if not open_walls:
        yield Finding("ok", f"sandbox for model-written code: all {len(walls)} walls stand")
