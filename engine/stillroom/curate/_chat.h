/* Going over a conversation in the shape of chat completions, and counting its turns.
 *
 * What is let pass is what chat_of in facts.py lets pass, but for what is unusual: a content in
 * parts, a field that stands there twice, more calls than fit.
 */
#ifndef STILLROOM_CHAT_H
#define STILLROOM_CHAT_H

#include "_json.h"

#define MAX_CALLS 1024

typedef struct {
    Span span, last; /* all of it, and its last message: empty if there is none */
    Span calls[MAX_CALLS]; /* the ids of the tool calls so far, quotes included */
    int num_calls;
    ptrdiff_t num_turns;
    bool is_conversation; /* under this name, and not under `messages` */
    bool is_open;         /* no assistant's answer ends it */
} Chat;

static bool is_text(Span span, const char *text)
{
    const size_t size = strlen(text);
    return (size_t)(span.end - span.start) == size + 2 && memcmp(span.start + 1, text, size) == 0;
}

static bool is_same(Span one, Span other)
{
    const size_t size = (size_t)(one.end - one.start);
    return size == (size_t)(other.end - other.start) && memcmp(one.start, other.start, size) == 0;
}

static bool is_null(Place at, Place end)
{
    return at < end && *at == 'n';
}

/* Skips a text, which it gives, or null, of which it gives an empty span. */
static Place skip_text_or_null(Place at, Place end, Span *text)
{
    const bool has_text = !is_null(at, end);
    text->start = text->end = at;
    at = has_text ? skip_string(at, end) : skip_word(at, end, "null");
    if (has_text)
        text->end = at;
    return at;
}

static bool is_given(Span span)
{
    return span.start != span.end;
}

/* The fields of an object that were read; one that stands there twice is left to Python. */
static bool is_first(unsigned *seen, unsigned field)
{
    const bool is_new = !(*seen & 1u << field);
    *seen |= 1u << field;
    return is_new;
}

/* Skips `{"name": "…", "arguments": "…"}`. */
static Place skip_function(Place at, Place end)
{
    unsigned seen = 0;
    bool is_last;
    at = skip_opening(at, end, '{', '}', &is_last);
    while (at != NULL && !is_last) {
        Span name;
        at = skip_name(at, end, &name);
        if (at == NULL)
            return NULL;
        const bool is_name = is_text(name, "name");
        if (is_name || is_text(name, "arguments"))
            at = is_first(&seen, is_name) ? skip_string(at, end) : NULL;
        else
            at = skip_value(at, end, 4);
        if (at != NULL)
            at = skip_to_next(at, end, '}', &is_last);
    }
    return seen == 3 ? at : NULL;
}

/* Skips a tool call and notes its id. */
static Place skip_call(Place at, Place end, Chat *chat)
{
    unsigned seen = 0;
    bool is_last;
    at = skip_opening(at, end, '{', '}', &is_last);
    while (at != NULL && !is_last) {
        Span name, id;
        at = skip_name(at, end, &name);
        if (at == NULL)
            return NULL;
        if (is_text(name, "function")) {
            at = is_first(&seen, 0) ? skip_function(at, end) : NULL;
        } else if (is_text(name, "id")) {
            at = is_first(&seen, 1) ? skip_text_or_null(at, end, &id) : NULL;
            if (at == NULL || chat->num_calls == MAX_CALLS)
                return NULL;
            if (is_given(id))
                chat->calls[chat->num_calls++] = id;
        } else {
            at = skip_value(at, end, 3);
        }
        if (at != NULL)
            at = skip_to_next(at, end, '}', &is_last);
    }
    return seen & 1 ? at : NULL;
}

/* Skips null or a list of tool calls. */
static Place skip_calls(Place at, Place end, Chat *chat, bool *has_calls)
{
    bool is_last;
    *has_calls = false;
    if (is_null(at, end))
        return skip_word(at, end, "null");
    at = skip_opening(at, end, '[', ']', &is_last);
    *has_calls = at != NULL && !is_last;
    while (at != NULL && !is_last) {
        at = skip_call(skip_blanks(at, end), end, chat);
        if (at != NULL)
            at = skip_to_next(at, end, ']', &is_last);
    }
    return at;
}

/* Ids that are spelled alike are the same; of others Python tells whether they are. */
static bool was_called(const Chat *chat, Span id)
{
    for (int i = chat->num_calls - 1; i >= 0; i--)
        if (is_same(chat->calls[i], id))
            return true;
    return false;
}

enum { ROLE, CONTENT, TOOL_CALLS, TOOL_CALL_ID };

static Place skip_message(Place at, Place end, Chat *chat)
{
    const Place start = at;
    Span role = {at, at}, content = {at, at}, answers = {at, at};
    const int num_calls_before = chat->num_calls;
    unsigned seen = 0;
    bool is_last, has_calls = false;
    at = skip_opening(at, end, '{', '}', &is_last);
    while (at != NULL && !is_last) {
        Span name;
        at = skip_name(at, end, &name);
        if (at == NULL)
            return NULL;
        if (is_text(name, "content")) {
            at = is_first(&seen, CONTENT) ? skip_text_or_null(at, end, &content) : NULL;
        } else if (is_text(name, "role")) {
            at = is_first(&seen, ROLE) ? skip_text_or_null(at, end, &role) : NULL;
        } else if (is_text(name, "tool_calls")) {
            at = is_first(&seen, TOOL_CALLS) ? skip_calls(at, end, chat, &has_calls) : NULL;
        } else if (is_text(name, "tool_call_id")) {
            at = is_first(&seen, TOOL_CALL_ID) ? skip_text_or_null(at, end, &answers) : NULL;
        } else {
            at = skip_value(at, end, 2);
        }
        if (at != NULL)
            at = skip_to_next(at, end, '}', &is_last);
    }
    if (at == NULL)
        return NULL;
    const bool is_assistant = is_text(role, "assistant"), is_tool = is_text(role, "tool");
    if (!is_assistant) {
        chat->num_calls = num_calls_before; /* nobody else calls tools */
        if (!is_given(content) || !(is_tool || is_text(role, "user") || is_text(role, "system")))
            return NULL;
    }
    if (is_tool && is_given(answers) && !was_called(chat, answers))
        return NULL;
    chat->last = (Span){start, at};
    chat->num_turns += is_assistant;
    chat->is_open = !is_assistant || has_calls;
    return at;
}

static Place skip_chat(Place at, Place end, Chat *chat)
{
    bool is_last;
    chat->span.start = at;
    at = skip_opening(at, end, '[', ']', &is_last);
    while (at != NULL && !is_last) {
        at = skip_message(skip_blanks(at, end), end, chat);
        if (at != NULL)
            at = skip_to_next(at, end, ']', &is_last);
    }
    chat->span.end = at;
    return at;
}

#endif
