// Hooks of saved tensors that do the least: `pack` gives an alias of the tensor without its graph, as
// `Tensor.data` makes it, since a saved output would otherwise own the node that owns it; `unpack`
// gives it back.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace {

PyObject* data = nullptr;  // the getter of `Tensor.data`

PyObject* pack(PyObject*, PyObject* tensor) {
  return Py_TYPE(data)->tp_descr_get(data, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
}

PyObject* unpack(PyObject*, PyObject* alias) { return Py_NewRef(alias); }

PyMethodDef kPack = {"pack", pack, METH_O, nullptr};
PyMethodDef kUnpack = {"unpack", unpack, METH_O, nullptr};

}  // namespace

extern "C" PyObject* alias_hooks(PyObject* getter) {
  data = Py_NewRef(getter);
  return Py_BuildValue("(NN)", PyCFunction_New(&kPack, nullptr), PyCFunction_New(&kUnpack, nullptr));
}
