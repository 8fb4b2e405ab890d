"""When a sample ends: EOS, stop ids, stop strings, length, in this order, after each token.

What completes on the last allowed token is "stop". min_tokens needs no check for ids, which the sampler masks.
"""

from inference.request import Sequence
from inference.tokenizer import Tokenizer
from olmorl.contract.generation import FinishReason


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Judge the token that was appended last."""
    request = sequence.request
    if sequence.token_ids[-1] in request.stop_ids:
        return "stop"
    if sequence.stop_matcher is not None:
        text = sequence.stop_matcher.push(sequence.token_ids, search=sequence.num_output >= request.params.min_tokens)
        if text is not None:
            sequence.stop_text = text
            return "stop"
    if len(sequence.token_ids) >= sequence.max_tokens:
        return "length"
    return None


def output_text(sequence: Sequence, tokenizer: Tokenizer) -> str:
    """The text of a sample: without its EOS or stop id, and ending before a stop string."""
    if sequence.stop_text is not None:
        return sequence.stop_text
    ids = sequence.output_ids
    if ids and ids[-1] in sequence.request.stop_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids)


class TextFollower:
    """Follows the text of one sample as its tokens come, without decoding everything again.

    Only the tail is: ids before `_read` are already in `text`, and those from `_context` on are decoded once more with
    the new ones, because the text of an id depends on its left neighbours. Half a character is waited for.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_prompt: int) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._context = num_prompt
        self._read = num_prompt

    def follow(self, token_ids: list[int]) -> bool:
        """Take in the ids that are new; whether that brought any text."""
        known = self.tokenizer.decode(token_ids[self._context : self._read])
        fresh = self.tokenizer.decode(token_ids[self._context :])
        if len(fresh) <= len(known) or fresh.endswith("\N{REPLACEMENT CHARACTER}"):
            return False
        self.text += fresh[len(known) :]
        self._context, self._read = self._read, len(token_ids)
        return True


class StopMatcher(TextFollower):
    """Finds the stop string that completes first."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Tokenizer, *, num_prompt: int) -> None:
        super().__init__(tokenizer, num_prompt=num_prompt)
        self.stop = stop

    def push(self, token_ids: list[int], *, search: bool) -> str | None:
        """The text before the match, once there is one that completes in text not seen before."""
        seen = len(self.text)
        return self._match(seen) if self.follow(token_ids) and search else None

    def _match(self, seen: int) -> str | None:
        ends = []
        for stop in self.stop:
            start = self.text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        return self.text[: min(ends)[1]] if ends else None
