"""Programs judged by a code server (/test_program, /test_program_stdio) in place of the sandbox of this machine."""

from olmorl.rewards.endpoint import Endpoint, Refused
from olmorl.rewards.program import read_assertions, read_io_tests, read_source, share_passed
from olmorl.rewards.settings import VerifierSettings
from olmorl.rewards.verdict import Verdict, scored, unscorable

CONCURRENCY = 64


class RemoteProgram:
    """`code` and `code_stdio` where reward.code_api_url is set."""

    def __init__(self, endpoint: Endpoint, settings: VerifierSettings, *, stdio: bool) -> None:
        self.endpoint = endpoint
        self._stdio = stdio
        self._seconds = settings.code_seconds
        self._threshold = settings.code_pass_threshold

    async def __call__(self, completion: str, ground_truth: object, prompt: str | None = None) -> Verdict:
        tests: list | None
        if self._stdio:
            io_tests = read_io_tests(ground_truth)
            tests = io_tests and [{"input": test.stdin, "output": test.expected} for test in io_tests]
        else:
            tests = read_assertions(ground_truth)
        if not tests:
            return unscorable(f"the ground truth {ground_truth!r:.80} is no list of tests")
        source = read_source(completion)
        if not source.strip():
            return scored(0.0, "no program in the completion")
        body = {"program": source, "tests": tests, "max_execution_time": self._seconds}
        try:
            reply = await self.endpoint.post("test_program_stdio" if self._stdio else "test_program", body)
        except Refused as error:
            return Verdict(status="error", detail=f"code server: {error}")
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or len(results) != len(tests):
            return Verdict(status="error", detail=f"code server: no result for each test in {str(reply)[:200]}")
        return share_passed([bool(result) for result in results], threshold=self._threshold)
