"""Where the last merge of every token of a byte-level vocabulary joins.

The definition is byte pair encoding of each token with the ranks below its own. `_last_merge` does that for one token;
`last_merges` does the same steps for all tokens of one length at a time, a merge of each in every round, since a
released vocabulary has a million of them. Pieces are looked up by a hash of their bytes and what is found is compared
byte for byte, so the result does not rest on the hash.
"""

from __future__ import annotations

import numpy as np

FEWEST = 64  # tokens of one length that are worth the rounds; fewer are faster one by one
LONGEST = 32  # bytes; of no greater length has a vocabulary many tokens
MULTIPLIER = 0x9E3779B97F4A7C15  # of the hash: any odd number without a pattern
MAX_CHAIN = 16  # tokens in one slot of the table; by chance there are 5, more are made on purpose


def last_merges(tokens: list[bytes]) -> list[int]:
    """For every token, by rank, how many bytes the left one of the two pieces has that it is merged from; 0 if byte
    pair encoding with only the ranks below its own does not leave two pieces. The pair of lowest rank is merged first,
    of equal pairs the leftmost. The 256 single bytes are among the tokens, which all differ.
    """
    joins = np.zeros(len(tokens), np.int64)
    vocabulary = _Vocabulary(tokens)
    together = []
    if vocabulary.max_chain <= MAX_CHAIN:
        counts = np.bincount(vocabulary.lengths, minlength=LONGEST + 1)
        together = [length for length in range(2, LONGEST + 1) if counts[length] >= FEWEST]
    for length in together:
        vocabulary.merge(length, joins)
    alone = np.flatnonzero(np.isin(vocabulary.lengths, [1, *together], invert=True)).tolist()
    if alone:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        for rank in alone:
            joins[rank] = _last_merge(tokens[rank], rank, ranks)
    result: list[int] = joins.tolist()
    return result


class _Vocabulary:
    """Tokens, of which those of at most LONGEST bytes can be looked up.

    The table has a slot for the upper bits of a hash, with the rank of one token; others of the slot follow in a chain.
    """

    def __init__(self, tokens: list[bytes]) -> None:
        self._never = len(tokens)
        self.lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._begins = np.cumsum(self.lengths) - self.lengths
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        self._powers = np.cumprod(np.array([1] + [MULTIPLIER] * LONGEST, np.uint64))
        self._prefixes = {}  # length -> hash of every prefix of every token of that length
        hashes = np.zeros(len(tokens), np.uint64)
        for length in range(1, LONGEST + 1):
            ranks, text = self._of_length(length)
            prefixes = np.zeros((len(ranks), length + 1), np.uint64)
            for n in range(length):
                prefixes[:, n + 1] = (prefixes[:, n] + text[:, n] + np.uint64(1)) * self._powers[1]
            self._prefixes[length] = prefixes
            hashes[ranks] = prefixes[:, length]
        n_bits = len(tokens).bit_length() + 3  # an eighth of the slots are taken at most
        self._shift = np.uint64(64 - n_bits)
        short = np.flatnonzero(self.lengths <= LONGEST)
        slots = hashes[short] >> self._shift
        order = np.argsort(slots, kind="stable")
        short, slots = short[order], slots[order]
        is_first = np.concatenate(([True], slots[1:] != slots[:-1]))
        self._heads = np.full(1 << n_bits, -1, np.int32)
        self._heads[slots[is_first]] = short[is_first]
        self._nexts = np.full(len(tokens), -1, np.int32)
        self._nexts[short[:-1]] = np.where(is_first[1:], -1, short[1:])
        self.max_chain = int(np.diff(np.flatnonzero(np.append(is_first, True))).max())
        ranks, text = self._of_length(2)
        self._pairs = np.full((256, 256), self._never, np.int32)
        self._pairs[text[:, 0], text[:, 1]] = ranks

    def merge(self, length: int, joins: np.ndarray) -> None:
        """Set `joins` of the tokens of one length; see `last_merges`.

        One row a token: `cuts` are the ends of its pieces, `pairs` the ranks of what two neighbours would be. All have
        the same number of pieces, as a token without a merge left is dropped.
        """
        owners, text = self._of_length(length)
        prefixes = self._prefixes[length]
        cuts = np.tile(np.arange(length + 1, dtype=np.int8), (len(owners), 1))
        pairs = self._pairs[text[:, :-1], text[:, 1:]]
        for n_pairs in range(length - 2, 0, -1):  # that are left after the round
            best = pairs.argmin(axis=1)
            goes_on = pairs[np.arange(len(best)), best] < owners
            if not goes_on.all():
                owners, prefixes, cuts, pairs, best = (a[goes_on] for a in (owners, prefixes, cuts, pairs, best))
            cuts = _without(cuts, best + 1)
            if n_pairs == 1 or not len(owners):
                break
            pairs = _without(pairs, best)
            left, right = np.flatnonzero(best > 0), np.flatnonzero(best < n_pairs)
            rows, columns = np.concatenate((left, right)), np.concatenate((best[left] - 1, best[right]))
            begins, ends = cuts[rows, columns], cuts[rows, columns + 2]
            sizes = (ends - begins).astype(np.int64)
            hashes = prefixes[rows, ends] - prefixes[rows, begins] * self._powers[sizes]
            pairs[rows, columns] = self._find(hashes, self._begins[owners[rows]] + begins, sizes)
        joins[owners] = cuts[:, 1]

    def _of_length(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        ranks = np.flatnonzero(self.lengths == length)
        return ranks, self._bytes[self._begins[ranks][:, None] + np.arange(length)]

    def _find(self, hashes: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """The ranks of pieces, given their hashes and where they are; `never` for what is no token."""
        found = np.full(len(hashes), self._never)
        ranks = self._heads[hashes >> self._shift]
        at = np.flatnonzero(ranks >= 0)
        ranks = ranks[at]
        while len(at):
            same = self._equal(ranks, begins[at], sizes[at])
            found[at[same]] = ranks[same]
            ranks, at = self._nexts[ranks[~same]], at[~same]
            ranks, at = ranks[ranks >= 0], at[ranks >= 0]
        return found

    def _equal(self, ranks: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Whether tokens are the bytes of pieces, each compared with its own."""
        same: np.ndarray = self.lengths[ranks] == sizes
        if same.any():
            starts, begins, sizes = self._begins[ranks[same]], begins[same], sizes[same]
            ends = np.cumsum(sizes)
            inside = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
            equal = self._bytes[np.repeat(starts, sizes) + inside] == self._bytes[np.repeat(begins, sizes) + inside]
            same[same] = np.logical_and.reduceat(equal, ends - sizes)
        return same


def _without(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The matrix without one element of every row."""
    keep = np.ones(rows.shape, bool)
    keep[np.arange(len(rows)), columns] = False
    return rows[keep].reshape(len(rows), rows.shape[1] - 1)


def _last_merge(token: bytes, own_rank: int, ranks: dict[bytes, int]) -> int:
    """The same for one token."""
    never = len(ranks)
    find = ranks.get
    cuts = list(range(len(token) + 1))
    pairs = [find(token[n : n + 2], never) for n in range(len(token) - 1)]
    while len(pairs) > 1:
        best = min(pairs)
        if best >= own_rank:
            return 0
        n = pairs.index(best)
        del cuts[n + 1], pairs[n]
        if n:
            pairs[n - 1] = find(token[cuts[n - 1] : cuts[n + 1]], never)
        if n < len(pairs):
            pairs[n] = find(token[cuts[n] : cuts[n + 2]], never)
    return cuts[1] if pairs else 0
