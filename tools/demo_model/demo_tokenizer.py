"""The tokenizer of the demo model: byte-level BPE, its special tokens and its chat template."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import Message

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIALS: tuple[str, ...] = (END_OF_TEXT, TURN_START, TURN_END, PAD)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID, PAD_ID = range(4)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- else -%}{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] "
    "| trim }}{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges. All 256 bytes are in the alphabet, so any text survives; each digit is a
    token of its own.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_turn(message: Message) -> tuple[str, str]:
    """A turn as the chat template writes it, cut into the header and the rest."""
    return f"{TURN_START}{message['role']}\n", f"{message['content'].strip()}{TURN_END}\n"


def encode_story(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[float]]:
    """The tokens of a story with the end of text, and the weight of each in the loss."""
    ids = [*tokenizer.encode(text).ids, END_OF_TEXT_ID]
    return ids, [1.0] * len(ids)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt_weight: float
) -> tuple[list[int], list[float]]:
    """The tokens of a chat with the end of text; everything that the model need not say weighs
    `prompt_weight`.
    """
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        header, body = (tokenizer.encode(part).ids for part in render_turn(message))
        ids += [*header, *body]
        weights += [prompt_weight] * len(header)
        weights += [1.0 if message["role"] == "assistant" else prompt_weight] * len(body)
    return [*ids, END_OF_TEXT_ID], [*weights, 1.0]
