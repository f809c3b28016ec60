"""The fields of each API's requests that hold keys, and fields that only look like them."""

import json

import pytest

from stillroom.recording.headers import Headers, RequestHead
from stillroom.recording.request_keys import request_keys
from stillroom.secrecy.key_fields import keys_in_fields, secret_forms, without_signatures
from stillroom.secrecy.redaction import Redactor

KEY = "q7Lm2xWv9Rt4Zb8Kc1Nd6"
SIGNED = f"https://files.test/a.png?X-Amz-Date=1&X-Amz-Signature={KEY}&b=2"


def mcp(**fields):
    return {"tools": [{"type": "mcp", "server_label": "shop", **fields}]}


def sent(*parts, field="messages"):
    return {field: [{"role": "user", "content": [*parts]}]}


def azure(**authentication):
    return {"data_sources": [{"parameters": {"authentication": authentication}}]}


def gemini(**config):
    return {"tools": [{"retrieval": {"externalApi": {"authConfig": config}}}]}


FIELDS = {
    "openai": [
        mcp(authorization=KEY),
        mcp(headers={"Authorization": f"Bearer {KEY}"}),
        mcp(headers={"X-Tenant": KEY, "Accept": "application/json"}),
        mcp(headers={"X-Tenant": f"Bearer {KEY}"}),
        mcp(headers={"X-Tenant": f"in/base64+{KEY}=="}),
        mcp(server_url=f"https://mcp.test/sse?a=1&api_key={KEY}"),
        mcp(server_url=f"https://mcp.test/s/{KEY}/mcp?a=1"),
        mcp(server_url=f"https://me:{KEY}@mcp.test/mcp"),
        {"tools": [{"type": "shell", "environment": {"network_policy": {"domain_secrets": [
            {"domain": "a.test", "name": "A", "value": KEY}]}}}]},
        {"tools": [{"type": "image_generation", "input_image_mask": {"image_url": SIGNED}}]},
        sent({"type": "image_url", "image_url": {"detail": "low", "url": SIGNED}}),
        sent({"type": "input_image", "image_url": SIGNED}, field="input"),
        sent({"type": "input_file", "file_url": SIGNED}, field="input"),
        {"input": [{"type": "function_call_output", "output": [
            {"type": "input_image", "image_url": SIGNED}]}]},
        {"prompt": {"id": "p", "variables": {"f": {"type": "input_file", "file_url": SIGNED}}}},
    ],
    "anthropic": [
        {"mcp_servers": [{"type": "url", "url": "https://m.test", "authorization_token": KEY}]},
        {"mcp_servers": [{"type": "url", "url": f"https://m.test/{KEY}/mcp"}]},
        sent({"type": "image", "source": {"type": "url", "url": SIGNED}}),
        sent({"type": "tool_result", "content": [
            {"type": "document", "source": {"url": SIGNED, "type": "url"}}]}),
    ],
    "google": [
        {"tools": [{"parallelAiSearch": {"apiKey": KEY}}]},
        gemini(apiKeyConfig={"name": "key", "apiKeyString": KEY}),
        gemini(oauthConfig={"accessToken": KEY}),
        gemini(oidcConfig={"idToken": KEY}),
        gemini(httpBasicAuthConfig={"credentialSecret": KEY}),
        {"tools": [{"mcpServers": [{"streamableHttpTransport": {
            "url": f"https://m.test/{KEY}/mcp", "headers": {"X-Tenant": KEY}}}]}]},
        {"tools": [{"type": "mcp_server", "url": f"https://m.test/{KEY}"}]},
        {"contents": [{"parts": [{"fileData": {"fileUri": SIGNED}}]}]},
    ],
    "openrouter": [
        {"plugins": [{"id": "web", "api_key": KEY}]},
        {"provider": {"api_keys": {"exa": KEY}}},
        sent({"type": "file", "file": {"filename": "a.pdf", "file_data": SIGNED}}),
        sent({"type": "video_url", "video_url": {"url": SIGNED}}),
    ],
    "azure": [
        azure(type="api_key", key=KEY),
        azure(type="access_token", access_token=KEY),
        azure(type="connection_string", connection_string=f"AccountKey={KEY}"),
        azure(type="key_and_key_id", key=KEY, key_id="1"),
        azure(type="encoded_api_key", encoded_api_key=KEY),
        azure(type="username_and_password", username="me", password=KEY),
        azure(type="ConnectionString", connectionString=f"AccountKey={KEY}"),
        {"data_sources": [{"parameters": {"embedding_dependency": {
            "type": "endpoint", "authentication": {"type": "api_key", "key": KEY}}}}]},
        {"dataSources": [{"parameters": {"key": KEY, "embeddingKey": KEY}}]},
    ],
    "others": [
        {"tools": [{"type": "connector", "authorization": {"type": "api-key", "value": KEY}}]},
        sent({"type": "document_url", "document_url": SIGNED}),
        {"connectors": [{"id": "web", "user_access_token": KEY}]},
        mcp(extra_headers={"X-Tenant": KEY}),
        mcp(headers=[{"name": "Authorization", "value": f"Bearer {KEY}"}]),
        mcp(headers=[{"key": "X-Tenant", "value": KEY}]),
        mcp(env=[{"name": "SHOP_API_KEY", "value": KEY}]),
        {"extra_body": {"secrets": {"shop": KEY}}},
        {"data_sources": [{"parameters": {"uri": f"mongodb+srv://me:{KEY}@h.test/db"}}]},
        {"litellm_params": {"vertex_credentials": json.dumps({"private_key": KEY})}},
        {"extra_body": {"secrets": json.dumps({"shop": KEY[:12]})}},
        {"extra_body": {"api_key": {"type": "string", "value": KEY}}},
    ],
}  # fmt: skip
PROPERTIES = {
    "key": {"type": "string", "default": "default-key-value-1"},
    "api_key": {"type": ["string", "null"], "const": "constant-value-01"},
}
KEPT = [
    ({"tools": [{"type": "file_search", "filters": {"type": "and", "filters": [
        {"type": "eq", "key": "document_type", "value": "documentary_1950s"}]}}]},
     "document_type documentary_1950s"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": PROPERTIES, "examples": [{"token": "a-first-token-1"}],
        "dependentRequired": {"api_key": ["customer_id_number"]}}}}]},
     "default-key-value-1 constant-value-01 a-first-token-1 customer_id_number"),
    ({"response_format": {"json_schema": {"schema": {"properties": PROPERTIES}}}},
     "default-key-value-1 constant-value-01"),
    ({"tools": [{"input_examples": [{"key": "C-minor-scale", "password": "hunter-22"}]}]},
     "C-minor-scale hunter-22"),
    ({"max_tokens": 100000000, "prompt_cache_key": "cache-of-7", "stop": ["</answer>"]},
     "100000000 cache-of-7 </answer>"),
    ({"tool_choice": {"type": "function", "function": {"name": "get_api_key"}}}, "get_api_key"),
    (azure(type="user_assigned_managed_identity"), "user_assigned_managed_identity"),
    (gemini(apiKeyConfig={"name": "x-goog-api-key-2"}, authType="API_KEY_AUTH"),
     "x-goog-api-key-2 API_KEY_AUTH"),
    (mcp(headers={"Accept": "application/vnd.shop.v3+json"}), "application/vnd.shop.v3+json"),
    (mcp(server_url="https://a1b2c3d4e5f6g7h8i9.test/v1/projects/shop-project-123456/mcp"),
     "a1b2c3d4e5f6g7h8i9 shop-project-123456"),
    (mcp(connector_id="connector_googlecalendar"), "connector_googlecalendar"),
    (sent({"type": "tool_use", "input": {"password": "in-use-77", "url": "https://x.test/?key=of-7"}},
          {"type": "thinking", "signature": "EqQBCgIYAhIM1"}, {"type": "text", "text": SIGNED}),
     f"in-use-77 ?key=of-7 EqQBCgIYAhIM1 {SIGNED}"),
    (sent({"text": "Rome is large."}) | {"metadata": {"answer_key": "Paris.\nRome is large."}},
     "Rome large."),
    (sent({"type": "image_url", "image_url": {"url": "https://x.test/a.png?width=7&h=9"}}),
     "https://x.test/a.png?width=7&h=9"),
]  # fmt: skip


def scrubbed(body: bytes) -> str:
    keys = request_keys(RequestHead("POST", "/v1/chat/completions", Headers()), body)
    return without_signatures(Redactor(keys).redact_bytes(body)).decode(errors="replace")


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("api", FIELDS)
def test_a_key_is_found_in_each_field_for_keys_of_an_api(api, is_whole):
    """Of a body that is cut, the fields before the cut are searched in the same way."""
    for fields in FIELDS[api]:
        body = json.dumps(fields | {"model": "m"}).encode()
        text = scrubbed(body if is_whole else body[:-2])
        assert KEY[:12] not in text
        assert "[key]" in text
        assert '"model": "' in text


@pytest.mark.parametrize(("fields", "kept"), KEPT)
def test_what_only_looks_like_a_key_is_recorded(fields, kept):
    text = scrubbed(json.dumps(fields).encode())
    assert [part for part in kept.split() if part not in text] == []


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize(
    "key",
    [
        'pass"word\\of-7',
        "pässwörd-of-7",
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwggSjAgEAAoIBAQC7VJTU\n",
    ],
)
def test_a_key_with_characters_that_json_escapes_is_found(key, is_ascii):
    body = {"api_key": key, "extra_body": {"credentials": json.dumps({"private_key": key})}}
    text = scrubbed(json.dumps(body, ensure_ascii=is_ascii).encode())
    assert not any(part in text for part in ("pass", "ssw", "MIIE", "BKcw"))


@pytest.mark.parametrize("is_ascii", [True, False])
def test_keys_are_found_wherever_a_body_is_cut(is_ascii):
    body = {
        "messages": [{"role": "user", "content": "the password: in-use-77"}],
        "tools": [{"authorization": {"type": "api-key", "value": KEY}}],
        "others": [1, -2.5e3, True, None, {"a": 'ü"𝄞\\'}],
    }
    data = json.dumps(body, ensure_ascii=is_ascii).encode()
    for end in range(data.index(KEY.encode()) + len(KEY), len(data)):
        text = scrubbed(data[:end])
        assert KEY not in text
        assert "in-use-77" in text


def test_the_signature_of_a_file_is_found_if_its_address_is_escaped_or_cut():
    for escaped in (SIGNED.replace("&", "\\u0026"), SIGNED.replace("/", "\\/"), SIGNED[:-9]):
        text = scrubbed(b'{"messages": [{"image_url": {"url": "%b' % escaped.encode())
        assert KEY[:12] not in text
        assert "X-Amz-Signature=[key]" in text


@pytest.mark.parametrize(
    "url", ["https://h/?" + "key=a&" * 500_000, "https://h" + ";key=a/" * 500_000]
)
def test_the_keys_of_an_address_are_found_in_linear_time(url):
    text = without_signatures(b'{"image_url": "%b"}' % url.encode())
    assert text.count(b"[key]") == 500_000


@pytest.mark.parametrize("path", ["a" * 2_000_000, "1" * 2_000_000, "a1" * 1_000_000])
def test_a_key_in_a_long_path_is_found_in_linear_time(path):
    for end, is_key in (("", "a1" in path), ("!", False)):
        keys = set(keys_in_fields([("server_url", f"https://h/{path}{end}")]))
        assert (path + end in keys) == is_key


def test_a_request_is_valid_json_without_a_signature_that_has_escaped_characters():
    signed = 'https://x.test/a?sig=abcdefghij"cd\\e&b=2'
    for part in ({"image_url": signed}, {"source": {"url": signed, "type": "url"}}):
        recorded = json.loads(scrubbed(json.dumps(part).encode()))
        assert "'https://x.test/a?sig=[key]&b=2'" in str(recorded)


@pytest.mark.parametrize("line_end", ["\n", "\\n"])
def test_a_private_key_is_found_by_its_lines_alone(line_end):
    lines = ["-----BEGIN PRIVATE KEY-----", KEY, KEY[::-1], "-----END PRIVATE KEY-----"]
    private_key = line_end.join(lines)
    assert [*secret_forms(private_key)] == [private_key, *lines]
