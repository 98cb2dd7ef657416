"""Prompts of a given number of tokens, each of its own, as token ids or as text."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec

FIRST_ID = 32
"""Ids below it are special tokens, in many vocabularies."""

# Common and short, so that nearly every vocabulary has each of them as one token, after a space and at the start.
WORDS = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never
us left end along while might next sound below something thought both few those always show large often together
house world going want school important until form food keep children feet land side without boy once animals life
enough sometimes four head above kind almost live page got earth need far hand high year mother light parts country
father let night following picture being study second soon times story boys since white days ever paper hard near
sentence better best during today others however means try young sun ways thing whole example several change answer
room sea against top learn point city play five using usually
""".split()  # noqa: SIM905  # a list of 274 strings is worse to read


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What a server was found to understand."""

    token_ids: bool = True
    """Prompts may be lists of token ids."""
    last_id: int = 8192
    """Ids are drawn below it."""
    ignore_eos: str | None = "ignore_eos"
    """The field that makes the server go on past the end of a text, if there is one."""
    stream_options: bool = True
    """`stream_options` is understood."""
    length: int = 64
    """Ids or words that make a prompt of as many tokens as was asked for."""

    @property
    def words(self) -> str:
        """For people: what is sent."""
        prompt = "token ids" if self.token_ids else "text"
        return f"prompts as {prompt}, {self.ignore_eos or 'may end early'}"


class Workload:
    """Requests by number: the same seed and number give the same request."""

    def __init__(self, model: str | None, dialect: Dialect, seed: int) -> None:
        self._model = model
        self._dialect = dialect
        self._seed = seed

    def with_length(self, length: int) -> Workload:
        """The same with prompts of another number of ids or words."""
        return Workload(self._model, replace(self._dialect, length=length), self._seed)

    def body(self, number: int, max_tokens: int) -> bytes:
        """The JSON body of one request, unlike all others from its first token on.

        Numbers below zero are of requests that ask what the server takes: theirs hold the highest id that may be drawn.
        """
        dialect = self._dialect
        draw = random.Random(f"{self._seed} {number}")  # noqa: S311  # no secrets
        fields: dict[str, object] = {
            "prompt": self._prompt(draw, highest=number < 0),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self._model is not None:
            fields["model"] = self._model
        if dialect.stream_options:
            fields["stream_options"] = {"include_usage": True}
        if dialect.ignore_eos == "generation_config":
            config = {"eos_token_id": -1, "do_sample": False, "max_new_tokens": max_tokens}
            fields["generation_config"] = msgspec.json.encode(config).decode()
        elif dialect.ignore_eos is not None:
            fields[dialect.ignore_eos] = True
        return msgspec.json.encode(fields)

    def _prompt(self, draw: random.Random, *, highest: bool) -> list[int] | str:
        dialect = self._dialect
        if dialect.token_ids:
            ids = draw.choices(range(FIRST_ID, dialect.last_id), k=dialect.length)
            # Of a short prompt all ids may happen to be low: a vocabulary that is too small would seem large enough.
            return [*ids[:-1], dialect.last_id - 1] if highest else ids
        return " ".join(draw.choices(WORDS, k=dialect.length))
