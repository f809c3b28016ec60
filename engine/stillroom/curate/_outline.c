/* What curation decides a rollout by, cut out of its line without decoding the rest.
 *
 * A rollout is tens of kilobytes, of which a filter asks for some two hundred bytes and the number
 * of turns. outline() goes over a line once. It gives an outline only of a line that it is sure of:
 * a whole JSON object in UTF-8 with one plain conversation. Of everything else, right or wrong, it
 * gives None, and rows.py decodes the line as if this module were not there: what a row means is
 * decided in Python. tests/unit/curate/test_outline.py holds the two ways against each other.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "_chat.h"

/* One more whenever what outline() gives changes: outline.py takes no other module than its own. */
#define VERSION 2
#define MAX_KEPT 64

typedef struct {
    Span kept[MAX_KEPT]; /* short fields, each from its name to the end of its value */
    int num_kept;
    bool has_chat;
    bool has_gym_field; /* as NeMo Gym's rollouts have one */
    Chat chat;
} Row;

/* The fields of ShortFields in fields.py and of its like in supervised.py. */
static const char *const SHORT_FIELDS[] = {
    "stop_reason", "id", "task_id", "rewards", "success", "completed", "truncated", "tool_errors",
    "error", "errors", "tools", "stillroom", "reward", "total_reward", "metadata",
    "rollout_id",
};
#define NUM_SHORT_FIELDS ((int)(sizeof SHORT_FIELDS / sizeof *SHORT_FIELDS))

static bool is_short_field(Span name)
{
    for (int i = 0; i < NUM_SHORT_FIELDS; i++)
        if (name.start[1] == (unsigned char)SHORT_FIELDS[i][0] && is_text(name, SHORT_FIELDS[i]))
            return true;
    return false;
}

static Place skip_field(Place at, Place end, Row *row)
{
    Span name;
    at = skip_name(at, end, &name);
    if (at == NULL)
        return NULL;
    const bool is_conversation = is_text(name, "conversation");
    if (is_conversation || is_text(name, "messages")) {
        if (row->has_chat)
            return NULL;
        row->has_chat = true;
        row->chat.is_conversation = is_conversation;
        return skip_chat(at, end, &row->chat);
    }
    if (is_text(name, "output") || is_text(name, "responses_create_params"))
        row->has_gym_field = true;
    at = skip_value(at, end, 1);
    if (at != NULL && is_short_field(name)) {
        if (row->num_kept == MAX_KEPT)
            return NULL;
        row->kept[row->num_kept++] = (Span){name.start, at};
    }
    return at;
}

static bool read_row(Place at, Place end, Row *row)
{
    bool is_last;
    row->num_kept = row->chat.num_calls = 0;
    row->chat.num_turns = 0;
    row->has_chat = row->has_gym_field = row->chat.is_conversation = false;
    row->chat.is_open = true;
    row->chat.span = row->chat.last = (Span){at, at};
    at = skip_opening(skip_blanks(at, end), end, '{', '}', &is_last);
    while (at != NULL && !is_last) {
        at = skip_field(at, end, row);
        if (at != NULL)
            at = skip_to_next(at, end, '}', &is_last);
    }
    return at != NULL && row->has_chat && skip_blanks(at, end) == end;
}

/* Returns the short fields of a row as a JSON object of their own. */
static PyObject *short_fields(const Row *row)
{
    Py_ssize_t size = 2;
    for (int i = 0; i < row->num_kept; i++)
        size += (row->kept[i].end - row->kept[i].start) + (i > 0);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (bytes == NULL)
        return NULL;
    char *to = PyBytes_AsString(bytes);
    *to++ = '{';
    for (int i = 0; i < row->num_kept; i++) {
        const size_t length = (size_t)(row->kept[i].end - row->kept[i].start);
        if (i > 0)
            *to++ = ',';
        memcpy(to, row->kept[i].start, length);
        to += length;
    }
    *to = '}';
    return bytes;
}

static PyStructSequence_Field outline_fields[] = {
    {"fields", "the short fields, as a JSON object"},
    {"is_conversation", "whether the messages are called so, and not `messages`"},
    {"start", "where the list of messages starts in the line"},
    {"end", "where it ends"},
    {"last_start", "where the last message starts"},
    {"last_end", "where it ends; there is none if that is the same place"},
    {"num_turns", "how many of them are the assistant's"},
    {"is_open", "whether no answer of the assistant ends it"},
    {"has_gym_field", "whether a field stands there that NeMo Gym's rollouts have"},
    {NULL, NULL},
};
#define NUM_OUTLINE_FIELDS ((int)(sizeof outline_fields / sizeof *outline_fields) - 1)

static PyStructSequence_Desc outline_description = {
    "stillroom.curate._outline.Outline", "What a row is decided by.", outline_fields, NUM_OUTLINE_FIELDS,
};

typedef struct {
    PyTypeObject *outline_type;
} State;

static PyObject *as_outline(const State *state, const Row *row, Place line)
{
    const Chat *chat = &row->chat;
    PyObject *const values[] = {
        short_fields(row),
        PyBool_FromLong(chat->is_conversation),
        PyLong_FromSsize_t(chat->span.start - line),
        PyLong_FromSsize_t(chat->span.end - line),
        PyLong_FromSsize_t(chat->last.start - line),
        PyLong_FromSsize_t(chat->last.end - line),
        PyLong_FromSsize_t(chat->num_turns),
        PyBool_FromLong(chat->is_open),
        PyBool_FromLong(row->has_gym_field),
    };
    PyObject *found = PyStructSequence_New(state->outline_type);
    bool is_whole = found != NULL;
    for (int i = 0; i < NUM_OUTLINE_FIELDS; i++) {
        is_whole = is_whole && values[i] != NULL;
        if (found != NULL)
            PyStructSequence_SetItem(found, i, values[i]); /* takes it over */
        else
            Py_XDECREF(values[i]);
    }
    if (!is_whole)
        Py_CLEAR(found);
    return found;
}

static PyObject *outline(PyObject *module, PyObject *line)
{
    Py_buffer view;
    if (PyObject_GetBuffer(line, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Row row;
    const Place start = view.buf;
    PyObject *found;
    if (view.len > 0 && read_row(start, start + view.len, &row))
        found = as_outline(PyModule_GetState(module), &row, start);
    else
        Py_INCREF(found = Py_None);
    PyBuffer_Release(&view);
    return found;
}

PyDoc_STRVAR(outline_doc, "outline(line, /)\n--\n\n"
             "Returns the Outline of a line; None of a line that takes a closer look.");

static PyMethodDef methods[] = {{"outline", outline, METH_O, outline_doc}, {NULL, NULL, 0, NULL}};

static int add_short_fields(PyObject *module)
{
    PyObject *names = PyTuple_New(NUM_SHORT_FIELDS);
    int failed = names == NULL;
    for (int i = 0; !failed && i < NUM_SHORT_FIELDS; i++) {
        PyObject *name = PyUnicode_FromString(SHORT_FIELDS[i]);
        failed = name == NULL || PyTuple_SetItem(names, i, name) < 0;
    }
    failed = failed || PyModule_AddObjectRef(module, "SHORT_FIELDS", names) < 0;
    Py_XDECREF(names);
    return failed ? -1 : 0;
}

static int exec_module(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->outline_type = PyStructSequence_NewType(&outline_description);
    if (state->outline_type == NULL || PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        return -1;
    return add_short_fields(module);
}

static int traverse_module(PyObject *module, visitproc visit, void *arg)
{
    const State *state = PyModule_GetState(module);
    Py_VISIT(state->outline_type);
    return 0;
}

static int clear_module(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->outline_type);
    return 0;
}

static void free_module(void *module)
{
    clear_module(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_outline",
    .m_doc = "Outlines of rows that hold a conversation.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__outline(void)
{
    return PyModuleDef_Init(&definition);
}
