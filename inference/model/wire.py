"""A weight as it travels: the names that matter, and its checksum."""

import torch

from olmorl.contract.weights import tensor_checksum

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def checksum(tensor: torch.Tensor) -> int:
    """Of a tensor's bytes, as sender and receivers take it."""
    return tensor_checksum(tensor.detach().contiguous().view(torch.uint8).reshape(-1).cpu().numpy())
