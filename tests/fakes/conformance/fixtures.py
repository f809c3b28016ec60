"""The tools, resources and prompts of the suite, added to our own server."""

import base64
import json
import warnings
from typing import Annotated, Any, Literal

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts.base import Message, UserMessage
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from mcp.types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    InputRequiredResult,
    ListRootsRequest,
    SamplingMessage,
    SetLevelRequestParams,
    TextContent,
    TextResourceContents,
)
from pydantic import BaseModel, Field

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJg"
    "gg=="
)
WAV = base64.b64encode(
    b"RIFF\x26\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x80\x3e\x00\x00"
    b"\x02\x00\x10\x00data\x02\x00\x00\x00\x00\x00"
).decode()
JSON_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def text(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=words)])


def resource(uri: str, words: str, mime_type: str = "text/plain") -> EmbeddedResource:
    contents = TextResourceContents(uri=uri, mime_type=mime_type, text=words)
    return EmbeddedResource(type="resource", resource=contents)


def question(message: str, **properties: Any) -> ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def sampling(words: str, max_tokens: int) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=words))
    params = CreateMessageRequestParams(messages=[message], max_tokens=max_tokens)
    return CreateMessageRequest(params=params)


NAME = question("What is your name?", name={"type": "string"})


def answered(ctx: Context, key: str) -> dict[str, Any] | None:
    """What a person answered to the request `key`, as JSON; None if nothing fits."""
    answer = (ctx.input_responses or {}).get(key)
    return None if answer is None else answer.model_dump(by_alias=True, mode="json")


def add_fixtures(server: MCPServer) -> None:
    """Adds everything that the suite calls by name."""
    warnings.simplefilter("ignore", MCPDeprecationWarning)
    _add_simple_tools(server)
    _add_asking_tools(server)
    _add_tools_that_need_input(server)
    _add_resources(server)
    _add_prompts(server)
    server._lowlevel_server.add_request_handler(
        "logging/setLevel", SetLevelRequestParams, _set_level
    )


async def _set_level(ctx: Any, params: SetLevelRequestParams) -> EmptyResult:
    return EmptyResult()


def _add_simple_tools(server: MCPServer) -> None:  # noqa: C901
    tool = server.tool

    @tool(description="Returns text.")
    def test_simple_text() -> CallToolResult:
        return text("This is a simple text response for testing.")

    @tool(description="Returns an image.")
    def test_image_content() -> CallToolResult:
        image = ImageContent(type="image", data=PNG, mime_type="image/png")
        return CallToolResult(content=[image])

    @tool(description="Returns a sound.")
    def test_audio_content() -> CallToolResult:
        return CallToolResult(content=[AudioContent(type="audio", data=WAV, mime_type="audio/wav")])

    @tool(description="Returns a resource.")
    def test_embedded_resource() -> CallToolResult:
        words = "This is an embedded resource content."
        return CallToolResult(content=[resource("test://embedded-resource", words)])

    @tool(description="Returns text, an image and a resource.")
    def test_multiple_content_types() -> CallToolResult:
        document = json.dumps({"test": "data", "value": 123})
        return CallToolResult(
            content=[
                TextContent(type="text", text="Multiple content types test:"),
                ImageContent(type="image", data=PNG, mime_type="image/png"),
                resource("test://mixed-content-resource", document, "application/json"),
            ]
        )

    @tool(description="Fails.")
    def test_error_handling() -> CallToolResult:
        raise ToolError("This tool intentionally returns an error for testing")

    @tool(description="Logs three messages.")
    async def test_tool_with_logging(ctx: Context) -> CallToolResult:
        for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await ctx.info(words)
            await anyio.sleep(0.05)
        return text("logged")

    @tool(description="Logs a message.")
    async def test_logging_tool(ctx: Context) -> CallToolResult:
        await ctx.info("a message")
        return text("logged")

    @tool(description="Reports progress.")
    async def test_tool_with_progress(ctx: Context) -> CallToolResult:
        for done in (0, 50, 100):
            await ctx.report_progress(done, 100)
            await anyio.sleep(0.05)
        return text("done")

    @tool(description="Closes its stream before it answers.")
    async def test_reconnection(ctx: Context) -> CallToolResult:
        await ctx.close_sse_stream()
        await anyio.sleep(0.1)
        return text("Reconnection test completed successfully.")

    @tool(description="Has a schema with the words of JSON Schema 2020-12.")
    def json_schema_2020_12_tool(name: str = "") -> CallToolResult:
        return text(name)

    @tool(description="Takes an argument that is a header too.")
    def test_custom_headers(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})],
    ) -> CallToolResult:
        return text(region)

    @tool(description="Changes the list of tools.")
    async def test_trigger_tool_change(ctx: Context) -> CallToolResult:
        await ctx.notify_tools_changed()
        return text("changed")

    @tool(description="Changes the list of prompts.")
    async def test_trigger_prompt_change(ctx: Context) -> CallToolResult:
        await ctx.notify_prompts_changed()
        return text("changed")

    server._tool_manager.get_tool("json_schema_2020_12_tool").parameters = JSON_SCHEMA


class _Person(BaseModel):
    username: str = Field(description="User's response")
    email: str = Field(description="User's email address")


class _Defaults(BaseModel):
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


ENUMS: dict[str, Any] = {
    "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
    "titledSingle": {
        "type": "string",
        "oneOf": [
            {"const": "value1", "title": "First Option"},
            {"const": "value2", "title": "Second Option"},
            {"const": "value3", "title": "Third Option"},
        ],
    },
    "legacyEnum": {
        "type": "string",
        "enum": ["opt1", "opt2", "opt3"],
        "enumNames": ["Option One", "Option Two", "Option Three"],
    },
    "untitledMulti": {
        "type": "array",
        "items": {"type": "string", "enum": ["option1", "option2", "option3"]},
    },
    "titledMulti": {
        "type": "array",
        "items": {
            "anyOf": [
                {"const": "value1", "title": "First Choice"},
                {"const": "value2", "title": "Second Choice"},
                {"const": "value3", "title": "Third Choice"},
            ]
        },
    },
}


def _add_asking_tools(server: MCPServer) -> None:
    tool = server.tool

    @tool(description="Asks the client's model.")
    async def test_sampling(prompt: str, ctx: Context) -> CallToolResult:
        message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
        answer = await ctx.session.create_message(
            [message], max_tokens=100, related_request_id=ctx.request_id
        )
        return text(f"LLM response: {answer.content}")

    @tool(description="Asks a person.")
    async def test_elicitation(message: str, ctx: Context) -> CallToolResult:
        answer = await ctx.elicit(message, _Person)
        return text(f"User response: {answer}")

    @tool(description="Asks a person, with defaults.")
    async def test_elicitation_sep1034_defaults(ctx: Context) -> CallToolResult:
        schema = _Defaults.model_json_schema()
        answer = await ctx.session.elicit_form("defaults", schema, ctx.request_id)
        return text(f"Elicitation completed: action={answer.action}, content={answer.content}")

    @tool(description="Asks a person to choose.")
    async def test_elicitation_sep1330_enums(ctx: Context) -> CallToolResult:
        schema = {"type": "object", "properties": ENUMS}
        answer = await ctx.session.elicit_form("choices", schema, ctx.request_id)
        return text(f"Elicitation completed: action={answer.action}, content={answer.content}")

    @tool(description="Needs a client that samples.")
    def test_missing_capability(ctx: Context) -> CallToolResult:
        declared = ctx.client_capabilities
        if declared is None or declared.sampling is None:
            data = {"requiredCapabilities": {"sampling": {}}}
            raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, "sampling is needed", data)
        return text("sampled")

    @tool(description="Asks a person on its own stream.")
    async def test_streaming_elicitation(ctx: Context) -> CallToolResult | InputRequiredResult:
        if answered(ctx, "user_name") is None:
            return InputRequiredResult(input_requests={"user_name": NAME})
        return text("answered")


def _add_tools_that_need_input(server: MCPServer) -> None:  # noqa: C901
    tool = server.tool
    greeting = sampling("Generate a greeting", 50)

    @tool(description="Needs a name.")
    def test_input_required_result_elicitation(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        answer = answered(ctx, "user_name")
        if answer is None or not answer.get("content"):
            return InputRequiredResult(input_requests={"user_name": NAME})
        return text(f"Hello, {answer['content'].get('name')}!")

    @tool(description="Needs a model's answer.")
    def test_input_required_result_sampling(ctx: Context) -> CallToolResult | InputRequiredResult:
        answer = answered(ctx, "capital_question")
        if answer is None:
            asked_for = sampling("What is the capital of France?", 100)
            return InputRequiredResult(input_requests={"capital_question": asked_for})
        return text(str(answer["content"]))

    @tool(description="Needs the client's roots.")
    def test_input_required_result_list_roots(ctx: Context) -> CallToolResult | InputRequiredResult:
        answer = answered(ctx, "client_roots")
        if answer is None:
            return InputRequiredResult(input_requests={"client_roots": ListRootsRequest()})
        return text(str(answer["roots"]))

    @tool(description="Carries a state from round to round.")
    def test_input_required_result_request_state(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        if answered(ctx, "confirm") is None or ctx.request_state != "a-state":
            confirm = question("Please confirm", ok={"type": "boolean"})
            return InputRequiredResult(input_requests={"confirm": confirm}, request_state="a-state")
        return text("state-ok")

    @tool(description="Refuses a state that was changed.")
    def test_input_required_result_tampered_state(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        if ctx.request_state is None:
            confirm = question("Please confirm", ok={"type": "boolean"})
            return InputRequiredResult(input_requests={"confirm": confirm}, request_state="a-state")
        return text("state-ok")

    @tool(description="Needs three things at once.")
    def test_input_required_result_multiple_inputs(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        requests = {"user_name": NAME, "greeting": greeting, "client_roots": ListRootsRequest()}
        if any(answered(ctx, key) is None for key in requests):
            return InputRequiredResult(input_requests=requests, request_state="three")
        return text("all there")

    @tool(description="Needs two things one after the other.")
    def test_input_required_result_multi_round(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        if ctx.request_state == "round-1" and answered(ctx, "step1"):
            step = question("Step 2: What is your favorite color?", color={"type": "string"})
            return InputRequiredResult(input_requests={"step2": step}, request_state="round-2")
        if ctx.request_state == "round-2" and answered(ctx, "step2"):
            return text("both there")
        step = question("Step 1: What is your name?", name={"type": "string"})
        return InputRequiredResult(input_requests={"step1": step}, request_state="round-1")

    @tool(description="Needs what the client can give.")
    def test_input_required_result_capabilities(
        ctx: Context,
    ) -> CallToolResult | InputRequiredResult:
        declared = ctx.client_capabilities
        requests: dict[str, Any] = {}
        if declared and declared.sampling is not None:
            requests["greeting"] = greeting
        if declared and declared.elicitation is not None:
            requests["user_name"] = NAME
        if requests and not ctx.input_responses:
            return InputRequiredResult(input_requests=requests)
        return text("done")


def _add_resources(server: MCPServer) -> None:
    def static_text() -> str:
        return "This is the content of the static text resource."

    def static_binary() -> bytes:
        return base64.b64decode(PNG)

    def by_template(id: str) -> str:  # noqa: A002 (its name in the suite)
        return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})

    def watched() -> str:
        return "watched"

    for uri, function, mime_type in (
        ("test://static-text", static_text, "text/plain"),
        ("test://static-binary", static_binary, "image/png"),
        ("test://template/{id}/data", by_template, "application/json"),
        ("test://watched-resource", watched, "text/plain"),
    ):
        server.resource(uri, description="For a test.", mime_type=mime_type)(function)


def _add_prompts(server: MCPServer) -> None:
    prompt = server.prompt

    @prompt(description="Has no arguments.")
    def test_simple_prompt() -> str:
        return "This is a simple prompt for testing."

    @prompt(description="Has two arguments.")
    def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
        return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"

    @prompt(description="Holds a resource.")
    def test_prompt_with_embedded_resource(resourceUri: str) -> list[Message]:
        return [
            UserMessage(resource(resourceUri, "Embedded resource content for testing.")),
            UserMessage("Please process the embedded resource above."),
        ]

    @prompt(description="Holds an image.")
    def test_prompt_with_image() -> list[Message]:
        return [
            UserMessage(ImageContent(type="image", data=PNG, mime_type="image/png")),
            UserMessage("Please analyze the image above."),
        ]

    @prompt(description="Needs input.")
    def test_input_required_result_prompt(ctx: Context) -> Any:
        answer = answered(ctx, "user_context")
        if answer is None:
            asked_for = question("What context should the prompt use?", context={"type": "string"})
            return InputRequiredResult(input_requests={"user_context": asked_for})
        return f"Use this context: {answer['content']}"
