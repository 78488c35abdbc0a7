"""Chats in the manner of vLLM's chat example: default parameters that are changed, batches, templates, a tokenizer."""

import sys

from motet import LLM


def print_outputs(outputs):
    print("\nGenerated Outputs:\n" + "-" * 80)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\n")
        print(f"Generated text: {generated_text!r}")
        print("-" * 80)


def main():
    llm = LLM(model=sys.argv[1], enforce_eager=True, tensor_parallel_size=1, max_model_len=512, seed=0)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 12
    sampling_params.temperature = 0.7
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)

    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)

    chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    outputs = llm.chat(conversations[:2], sampling_params, use_tqdm=False, chat_template=chat_template)
    assert outputs[0].prompt.startswith("system: You are a helpful assistant\n"), outputs[0].prompt

    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    outputs = llm.generate({"prompt_token_ids": ids}, sampling_params)
    print_outputs(outputs)


if __name__ == "__main__":
    main()
