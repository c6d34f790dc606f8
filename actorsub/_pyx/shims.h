// What the binding needs of CPython's C API beyond what Cython writes by itself. Included by the extension alone, once.
#pragma once

#include <Python.h>

// `remote` enters the method table by hand: the wrapper that Cython generates adds a traceback entry, hence a code
// and a frame object, to every exception that leaves it, and that costs more than the rest of a refusal.
typedef PyObject* (*actorsub_fastcall)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

static PyMethodDef actorsub_remote_method = {
    "remote", NULL, METH_FASTCALL | METH_KEYWORDS,
    "remote($self, /, *args, **kwargs)\n--\n\n"
    "Calls the method as Ray's own `.remote()` does, after one look at whether the actor can take the call.\n\n"
    "Returns what Ray returns: one ObjectRef, a list of them, None or a generator, by `num_returns`.\n"
    "Raises ActorUnavailableError, ActorDiedError or DeadlineExceededError here only where the policy asks for\n"
    "it (`on_unavailable`, `on_pending`), and TypeError for arguments that do not fit the method."};

static int actorsub_add_remote(PyTypeObject* type, actorsub_fastcall function) {
  actorsub_remote_method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(function));
  PyObject* descriptor = PyDescr_NewMethod(type, &actorsub_remote_method);
  if (descriptor == NULL) return -1;
  int result = PyDict_SetItemString(type->tp_dict, "remote", descriptor);
  Py_DECREF(descriptor);
  PyType_Modified(type);
  return result;
}

// Methods are kept in the handle's dict, so reading one is a plain attribute. A class with a `__getattr__` written
// in Python, as Ray's and ours are, looks that one up at each access first; from 3.12 on the interpreter's cache of
// attributes avoids that, and would not serve a class with a slot like this.
#if PY_VERSION_HEX < 0x030C0000
static getattrofunc actorsub_full_getattro = NULL;

static PyObject* actorsub_getattro(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GenericGetAttr(object, name);
  if (value != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
  PyErr_Clear();
  return actorsub_full_getattro(object, name);
}

static void actorsub_hasten_getattr(PyTypeObject* type) {
  if (type->tp_getattro == actorsub_getattro) return;
  actorsub_full_getattro = type->tp_getattro;
  type->tp_getattro = actorsub_getattro;
  PyType_Modified(type);
}
#else
static void actorsub_hasten_getattr(PyTypeObject*) {}
#endif

// Makes a new instance of `type` one of its subclass `to`, as assigning `__class__` does for classes written in
// Python: sound where both have the same layout, which is looked at once (`actorsub_same_layout`).
static void actorsub_relabel(PyObject* object, PyTypeObject* to) {
  Py_INCREF(to);
  Py_SET_TYPE(object, to);
}

static PyObject** actorsub_tuple_items(PyObject* tuple) { return reinterpret_cast<PyTupleObject*>(tuple)->ob_item; }

static int actorsub_same_layout(PyTypeObject* type, PyTypeObject* subclass) {
  const unsigned long layout = Py_TPFLAGS_HAVE_GC;
  return subclass->tp_base == type && !(type->tp_flags & Py_TPFLAGS_HEAPTYPE) &&
         subclass->tp_basicsize == type->tp_basicsize && subclass->tp_itemsize == 0 && type->tp_itemsize == 0 &&
         subclass->tp_dictoffset == 0 && subclass->tp_weaklistoffset == 0 &&
         (subclass->tp_flags & layout) == (type->tp_flags & layout) && (type->tp_free == subclass->tp_free);
}

static void actorsub_set_dealloc(PyTypeObject* type, destructor dealloc) { type->tp_dealloc = dealloc; }

// The base frees the object but, being a static type, not its hold on the class.
static void actorsub_dealloc_as(PyTypeObject* base, PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  base->tp_dealloc(object);
  Py_DECREF(type);
}

static PyObject* actorsub_new_exception(PyObject* type, PyObject* empty_tuple) {
  // Not a call of the type: that would run Ray's Python-level __init__, which formats a message.
  return reinterpret_cast<PyTypeObject*>(type)->tp_new(reinterpret_cast<PyTypeObject*>(type), empty_tuple, NULL);
}
