"""The tokenizer of a checkpoint: transformers', or the same one without transformers' start-up
where that is certain.

Importing transformers takes over a second, and its AutoTokenizer imports torch where that is
installed. A folder whose tokenizer.json says everything is therefore read by the tokenizers
library, which transformers itself calls for each text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from enginebay.errors import CheckpointError, shown, shown_text
from enginebay.text import Tokenizer
from enginebay_models.checkpoint import read_json
from enginebay_worker.tokenizer import HuggingFaceTokenizer, TextTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Classes that are tokenizer.json and nothing else; others may rebuild it by rules of their own.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Settings with which transformers changes what tokenizer.json says.
_OVERRIDES = (
    "add_bos_token",
    "add_eos_token",
    "split_special_tokens",
    "auto_map",
    "tokenizer_padding",
)

_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`; CheckpointError when there is none or it cannot be read. Remote
    code is never run.
    """
    if not any((folder / name).is_file() for name in _FILES):
        allowed = f"one of {', '.join(_FILES)}"
        given = f"{folder} has no tokenizer"
        raise CheckpointError(
            given, allowed, "Copy the tokenizer's files of the model into the folder."
        )
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    _check_settings(config)
    if _may_be_plain(folder, config):
        plain = PlainTokenizer(folder, config)
        if plain.says_all(config):
            return TextTokenizer(plain)
    return TextTokenizer(_from_transformers(folder, config.get("tokenizer_class")))


def _check_settings(config: Mapping[str, Any]) -> None:
    """CheckpointError for a field of tokenizer_config.json of a type that no tokenizer has."""
    templates, added = config.get("chat_template"), config.get("added_tokens_decoder", {})
    rules = {
        "tokenizer_class": (isinstance(config.get("tokenizer_class"), str | None), "a name"),
        "chat_template": (
            isinstance(templates, str | list | dict | None),
            "a text, or several by name",
        ),
        "added_tokens_decoder": (
            isinstance(added, dict)
            and all(id_.isdecimal() and _is_added(t) for id_, t in added.items()),
            "an object from token ids to tokens",
        ),
    }
    for name, value in config.items():
        if name.endswith(("_token", "_special_tokens")) and not isinstance(value, bool):
            rules[name] = (
                all(_is_token(v) for v in _listed(name, value)),
                "a token, or a list of tokens",
            )
    for name, (is_right, allowed) in rules.items():
        if not is_right:
            given = f"tokenizer_config.json has {shown_text(name, 60)} = {shown(config[name])}"
            raise CheckpointError(given, allowed, "Fetch the file again.")


def _is_token(value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("content"), str)
    return isinstance(value, str | None)


def _is_added(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return False
    return isinstance(value.get("special", False), bool)


def _listed(name: str, value: Any) -> list[Any]:
    """The tokens of a field: one, a list of them, or, of extra_special_tokens, several by name."""
    if name == "extra_special_tokens" and isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _may_be_plain(folder: Path, config: Mapping[str, Any]) -> bool:
    if config.get("tokenizer_class") not in _GENERIC or any(name in config for name in _OVERRIDES):
        return False
    if not isinstance(config.get("chat_template"), str | None):
        return False  # several templates, chosen by name
    model = folder / "config.json"
    if model.is_file() and "mistral" in str(read_json(model).get("model_type")):
        return False  # transformers mends the pattern of some of them
    more = ("special_tokens_map.json", "added_tokens.json")
    return (folder / "tokenizer.json").is_file() and not any(
        (folder / name).is_file() for name in more
    )


def _named_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens that the configuration names by their role, such as eos_token."""
    for name, value in config.items():
        if name.endswith(("_token", "_special_tokens")):
            values = _listed(name, value)
            yield from (
                v["content"] if isinstance(v, dict) else str(v) for v in values if v is not None
            )


class PlainTokenizer:
    """What `enginebay.text.Tokenizer` uses of a fast tokenizer of transformers, from tokenizer.json
    alone.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (
            BaseException
        ) as error:  # the library raises nothing narrower, and a panic is no Exception
            _raise_what_is_not_the_librarys(error)
            given = f"{path} cannot be read: {shown_text(str(error))}"
            raise CheckpointError(
                given, "a tokenizer of the tokenizers library", "Fetch the file again."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self.chat_template: str | None = _read_template(folder, config)
        self.special_tokens_map = {
            name: value["content"] if isinstance(value, dict) else str(value)
            for name in _ROLES
            if (value := config.get(name)) is not None
        }
        """Special tokens by their role, which are variables of chat templates."""

    def says_all(self, config: Mapping[str, Any]) -> bool:
        """Whether tokenizer.json has every token that tokenizer_config.json would have transformers
        add.
        """
        tokens = self._tokenizer.get_added_tokens_decoder()
        known = {(id_, token.content, token.special) for id_, token in tokens.items()}
        added = config.get("added_tokens_decoder", {}).items()
        same = all(
            (int(i), token["content"], token.get("special", False)) in known for i, token in added
        )
        special = {token.content for token in tokens.values() if token.special}
        return same and all(name in special for name in _named_tokens(config))

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the tokenizers library, under the name that transformers gives it."""
        return self._tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Ids to text."""
        if clean_up_tokenization_spaces:
            return self.full.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=True,
            )
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def full(self) -> HuggingFaceTokenizer:
        """The same tokenizer by transformers."""
        return _from_transformers(self._folder, "PreTrainedTokenizerFast")


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a folder; CheckpointError when its file is no text."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        template: str | None = config.get("chat_template")
        return template
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        given = f"{path} cannot be read: {shown_text(str(error))}"
        raise CheckpointError(given, "a text in UTF-8", "Fetch the file again.") from error


def _raise_what_is_not_the_librarys(error: BaseException) -> None:
    """Raise the ends of this program; a panic of Rust is neither these nor an Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _from_transformers(folder: Path, kind: str | None) -> HuggingFaceTokenizer:
    # Importing transformers without torch gives advice that no user of ours can follow.
    logging.getLogger("transformers").addFilter(_is_no_advice)
    # The generic class by its own name: AutoTokenizer would import every model's configuration, and
    # torch.
    if kind in _GENERIC:
        from transformers import PreTrainedTokenizerFast as Loader
    else:
        from transformers import AutoTokenizer as Loader
    try:
        loaded: HuggingFaceTokenizer = Loader.from_pretrained(str(folder), trust_remote_code=False)
        ids = loaded.encode(
            "a", add_special_tokens=True
        )  # some settings are looked at by the first call
        loaded.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    except BaseException as error:  # by the file's contents it raises anything
        _raise_what_is_not_the_librarys(error)
        reason = shown_text(str(error).strip().partition("\n")[0]) or type(error).__name__
        given = f"the tokenizer in {folder} cannot be loaded: {reason}"
        todo = "Fetch its files again; tokenizers with code of their own are not run."
        raise CheckpointError(given, "a tokenizer that transformers knows", todo) from error
    return loaded
