"""Chat with a language model in the terminal. It remembers what was said; Ctrl-C stops an answer, Ctrl-D leaves.

python examples/chat.py
python examples/chat.py qwen2.5-coder-1.5b --system "You answer in one sentence." --temperature 0.7
"""

import argparse

import rlx


def fit(model, messages, room):
    """The conversation without its oldest turns, so that it leaves `room` tokens for the answer."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    turns = messages[len(system) :]
    while len(turns) > 1 and len(model.chat_tokens(system + turns)) + room > model.context:
        turns = turns[2:]  # a question and its answer
    return system + turns


def answer(model, messages, **options):
    """Print the answer while it is generated. Ctrl-C ends it there; what was said up to then is returned."""
    said = ""
    with model.stream(messages, **options) as stream:
        try:
            for piece in stream:
                said += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
    print()
    return said, stream.completion.usage


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="name, file or folder (default: %(default)s)")
    parser.add_argument("--precision", default="auto", help="f32: activations are not rounded to 8 bits; slower")
    parser.add_argument("--system", help="instructions that come before the conversation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--max-tokens", type=int, default=256, help="length of an answer (default: %(default)s)")
    parser.add_argument("--stop", action="append", default=[], help="end answers before this text; may be repeated")
    parser.add_argument("--usage", action="store_true", help="show how many tokens each turn took")
    args = parser.parse_args(argv)

    model = rlx.load(args.model, precision=args.precision)
    if model.template is None:
        parser.error(f"{args.model} has no chat template: it continues texts, but does not answer")
    options = {"max_tokens": args.max_tokens, "stop": args.stop, "temperature": args.temperature}
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return messages
        try:
            asked = fit(model, [*messages, {"role": "user", "content": question}], args.max_tokens)
            said, usage = answer(model, asked, **options)
        except rlx.errors.RequestError as error:  # the question alone does not fit the context
            print(error)
            continue
        messages = [*asked, {"role": "assistant", "content": said}]
        if args.usage:  # earlier turns come from the prefix cache
            prompt, cached, written = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            print(f"[prompt: {prompt} tokens, {cached} cached; answer: {written} tokens]")


if __name__ == "__main__":
    main()
