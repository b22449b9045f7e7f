"""Digests of data sets: what tells one from another."""

import hashlib
from collections.abc import Sequence

import torch

from polymode.data.sources import ArrayData, Data
from polymode.trees import leaves


def fingerprints(sources: Sequence[Data]) -> list[str]:
    """A digest of each data set; one that occurs several times is read once."""
    known = {id(source): fingerprint(source) for source in {id(s): s for s in sources}.values()}
    return [known[id(source)] for source in sources]


def fingerprint(data: Data) -> str:
    """A digest of a data set: of all its bytes when it is in memory, else of its length."""
    digest = hashlib.sha256(repr((data.num_examples, data.batch_size, data.drop_last)).encode())
    if isinstance(data, ArrayData):
        digest.update(repr(data.augment).encode() if data.augment else b"")
        for tensor in leaves((data.inputs, data.targets, data.weights)):
            digest.update(repr((tensor.dtype, tensor.shape)).encode())
            raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(raw.numpy().data)
    return digest.hexdigest()
