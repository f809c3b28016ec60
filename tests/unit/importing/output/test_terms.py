import pytest

from stillroom.importing.output.notes import terms_for, terms_notes


@pytest.mark.parametrize(
    ("provider", "model", "title"),
    [
        ("openai", "gpt-4o-2024-08-06", "OpenAI"),
        ("azure", "our-deployment", "OpenAI"),
        ("groq", "openai/gpt-oss-120b", None),
        ("openai_chat", "o3-mini", "OpenAI"),
        ("openrouter", "anthropic/claude-sonnet-4", "Anthropic"),
        ("aws.bedrock", "us.anthropic.claude-sonnet-4-20250514-v1:0", "Anthropic"),
        ("bedrock", "amazon.nova-pro-v1:0", "AWS"),
        ("bedrock", "qwen.qwen3-32b-v1:0", "AWS"),
        ("x", "eu.amazon.titan-text-express-v1", "AWS"),
        ("gemini", "gemini-2.5-flash", "Google"),
        ("x", "google/gemma-3-27b-it", "Gemma"),
        ("ollama", "gemma2:9b", "Gemma"),
        ("x", "gemma-7b-it", "Gemma"),
        ("ollama", "gemma4:31b", None),
        ("x", "google/gemma-4-31b-it", None),
        ("x", "grok-4", "xAI"),
        ("x", "ai21.jamba-1-5-large-v1:0", "AI21"),
        ("x", "command-r-plus", "Cohere"),
        ("x", "meta-llama/Llama-2-70b-chat-hf", "Meta (Llama 2 and 3)"),
        ("x", "Meta-Llama-3-8B-Instruct", "Meta (Llama 2 and 3)"),
        ("groq", "llama3-70b-8192", "Meta (Llama 2 and 3)"),
        ("x", "accounts/fireworks/models/llama-v3-70b", "Meta (Llama 2 and 3)"),
        ("x", "accounts/fireworks/models/llama-v3p1-70b", "Meta"),
        ("x", "meta.llama3-1-8b-instruct-v1:0", "Meta"),
        ("x", "Llama-3.3-70B-Instruct", "Meta"),
        ("x", "llama-4-maverick", "Meta"),
        ("x", "Qwen/Qwen2.5-72B-Instruct", "Qwen"),
        ("x", "Qwen/Qwen3-32B", None),
        ("x", "tencent/Hunyuan-A13B-Instruct", "Tencent"),
        ("deepseek", "deepseek-chat", None),
        ("mistral", "mistral-large-latest", None),
        ("x", "gpt-4.1", "OpenAI"),
    ],
)
def test_the_terms_of_a_model_follow_from_its_name_before_its_provider(provider, model, title):
    terms = terms_for(provider, model)
    assert (terms and terms.title) == title


def test_a_note_names_the_models_the_terms_and_where_to_read_them():
    (note,) = terms_notes({("bedrock", "meta.llama3-8b-instruct-v1:0"): 3, ("x", "qwen3"): 1})
    assert note.startswith(
        "outputs of meta.llama3-8b-instruct-v1:0: the terms of Meta (Llama 2 and"
    )
    assert "forbid improving other language models with outputs" in note
    assert note.endswith("read them before training: https://www.llama.com/license/")
