// The common cases of the saved-tensor hooks: parameters, and small tensors that stay or are noted
// in a chunk. Autograd calls the hooks thousands of times a step for these.
//
// The contract is `Hooks.pack` and `Hooks.unpack` in _hooks.py. A case is either done here, with
// their result (in a handle of its own, `Kept`), or left to them before anything has changed; so is
// whatever raises. No lock is taken: the GIL guards the dictionaries and the chunks, and is not given
// up between looking at a chunk and filling it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "without the GIL two threads could change a chunk at once"
#endif

// Return a new Python object for a tensor. As torch/csrc/autograd/python_variable.h declares it, which
// takes ten times as long to compile as all that is needed here.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace {

// ------------------------------------------------------------------------------- references

struct PythonError {};  // the interpreter holds the exception

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;  // one reference, or nullptr

Owned checked(PyObject* result) {
  if (result == nullptr) throw PythonError{};
  return Owned(result);
}

int checked(int status) {
  if (status < 0) throw PythonError{};
  return status;
}

Py_ssize_t number(PyObject* integer) {
  const Py_ssize_t value = PyLong_AsSsize_t(integer);
  if (value == -1 && PyErr_Occurred()) throw PythonError{};
  return value;
}

Owned referent(PyObject* weak) {  // nullptr: it is gone
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  checked(PyWeakref_GetRef(weak, &object));
  return Owned(object);
#else
  PyObject* object = PyWeakref_GetObject(weak);
  return Owned(object == Py_None ? nullptr : Py_NewRef(object));
#endif
}

PyObject* found(PyObject* dictionary, PyObject* key) {  // borrowed; nullptr: not in it
  PyObject* value = PyDict_GetItemWithError(dictionary, key);
  if (value == nullptr && PyErr_Occurred()) throw PythonError{};
  return value;
}

// ------------------------------------------------------------------------------- classes

// An attribute or a method of a class, looked up once.
class Member {
 public:
  Member(PyObject* type, const char* name)
      : descriptor_(checked(PyObject_GetAttrString(type, name)).release()) {}

  Owned of(PyObject* object) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return checked(Py_TYPE(descriptor_)->tp_descr_get(descriptor_, object, type));
  }
  bool is_true(PyObject* object) const { return of(object).get() == Py_True; }
  Owned call(PyObject* object) const { return checked(PyObject_CallOneArg(descriptor_, object)); }

 private:
  PyObject* descriptor_;
};

// A name in `__slots__`: where its instances have the reference. Reading it so takes a tenth of the
// time that its descriptor takes.
class Slot {
 public:
  Slot(PyObject* type, const char* name) {
    const Owned descriptor = checked(PyObject_GetAttrString(type, name));
    if (!Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) throw std::logic_error(name);
    const auto* member = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member;
    if (member->type != T_OBJECT_EX) throw std::logic_error(name);
    offset_ = member->offset;
  }

  PyObject* of(PyObject* object) const {  // borrowed
    PyObject* value = at(object);
    if (value == nullptr) throw std::logic_error("a slot has no value yet");
    return value;
  }
  bool is_true(PyObject* object) const { return of(object) == Py_True; }
  void set(PyObject* object, PyObject* value) const {
    PyObject* before = at(object);
    at(object) = Py_NewRef(value);
    Py_XDECREF(before);
  }

 private:
  PyObject*& at(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }

  Py_ssize_t offset_;
};

// Where the instances of a tensor class have the pointer to their implementation. Reading it so takes
// a tenth of the time that `_cdata` takes; it is found by what `_cdata` says of the first tensors.
class Implementation {
 public:
  explicit Implementation(PyObject* type) : pointer_(type, "_cdata") {}

  c10::TensorImpl& of(PyObject* tensor) {
    if (confirmations_ == kEnough) return *at(tensor, offset_);
    void* address = PyLong_AsVoidPtr(pointer_.of(tensor).get());
    if (address == nullptr) throw PythonError{};
    confirm(tensor, address);
    return *static_cast<c10::TensorImpl*>(address);
  }

 private:
  static constexpr int kEnough = 16, kNever = -1;

  static c10::TensorImpl* at(PyObject* tensor, Py_ssize_t offset) {
    return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(tensor) + offset);
  }

  void confirm(PyObject* tensor, void* address) {
    if (confirmations_ == kNever) return;
    if (confirmations_ == 0) {
      const auto end = static_cast<Py_ssize_t>(Py_TYPE(tensor)->tp_basicsize);
      offset_ = sizeof(PyObject);
      while (offset_ < end && at(tensor, offset_) != address) offset_ += sizeof(void*);
      if (offset_ >= end) { confirmations_ = kNever; return; }
    }
    confirmations_ = at(tensor, offset_) == address ? confirmations_ + 1 : kNever;
  }

  Member pointer_;
  Py_ssize_t offset_ = 0;
  int confirmations_ = 0;
};

using Reference = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// A tensor for the length of a call, without a reference: to count one takes longer than to ask.
class Borrowed {
 public:
  explicit Borrowed(c10::TensorImpl& implementation) : tensor_(Reference::reclaim(&implementation)) {}
  ~Borrowed() { tensor_.unsafeReleaseIntrusivePtr().release(); }
  Borrowed(const Borrowed&) = delete;

  const at::TensorBase& tensor() const { return tensor_; }

 private:
  at::TensorBase tensor_;
};

// The same values with the same version counter, without the graph: as `detach` gives, in a third of
// the time.
Reference alias_of(const c10::TensorImpl& implementation) {
  auto alias = implementation.shallow_copy_and_detach(implementation.version_counter(), false);
  alias->set_autograd_meta(nullptr);
  return alias;
}

Owned python_object(const Reference& tensor) {
  return checked(THPVariable_Wrap(at::TensorBase(tensor)));
}

struct Tensor {
  explicit Tensor(PyObject* type)
      : device(type, "device"), storage(type, "untyped_storage"), implementation_(type) {}

  c10::TensorImpl& implementation(PyObject* tensor) const { return implementation_.of(tensor); }

  Member device, storage;

 private:
  mutable Implementation implementation_;
};

struct Record {
  explicit Record(PyObject* type)
      : device(type, "device"), small_bytes(type, "small_bytes"), small_keys(type, "small_keys") {}

  Slot device, small_bytes, small_keys;
};

struct Chunk {
  explicit Chunk(PyObject* type)
      : capacity_bytes(type, "capacity_bytes"), handles(type, "handles"), kept(type, "kept"),
        record(type, "record"), used(type, "used") {}

  Slot capacity_bytes, handles, kept, record, used;
};

struct SmallHandle {
  explicit SmallHandle(PyObject* type)
      : alias(type, "alias"), chunk(type, "chunk"), version(type, "version"),
        type(reinterpret_cast<PyTypeObject*>(Py_NewRef(type))) {}

  Slot alias, chunk, version;
  PyTypeObject* type;
};

struct Classes {
  explicit Classes(PyObject* items)
      : plain(Py_NewRef(PyTuple_GET_ITEM(items, 0))),
        has_plain_storage(Py_NewRef(PyTuple_GET_ITEM(items, 1))),
        tensor(PyTuple_GET_ITEM(items, 2)), record(PyTuple_GET_ITEM(items, 3)),
        chunk(PyTuple_GET_ITEM(items, 4)), handle(PyTuple_GET_ITEM(items, 5)) {}

  bool has_plain(PyObject* object) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain); ++i) {
      if (Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(plain, i)))) {
        return true;
      }
    }
    return false;
  }

  PyObject* plain;              // a tuple of the tensor classes that are
  PyObject* has_plain_storage;  // `_has_plain_storage`
  Tensor tensor;
  Record record;
  Chunk chunk;
  SmallHandle handle;
};

const Classes* classes = nullptr;  // made once and never freed

// ------------------------------------------------------------------------------- handles

// A saved tensor in a third of the memory that a `Resident` or a `SmallHandle` takes with its alias:
// what is kept for a whole step has as a rule left the processor's caches. It becomes the one or the
// other where Python has to look at it.
struct Kept {
  PyObject_HEAD
  Reference tensor;     // nullptr: `handle` has it
  PyObject* chunk;      // owned, or nullptr
  PyObject* handle;     // the `SmallHandle` that it has become, owned; or nullptr
  uint32_t version, place;  // `place` in the list of a chunk that may leave
};

// Those of a chunk that may leave, by their `place`; nullptr for one that has died.
struct KeptList {
  PyObject_HEAD
  std::vector<Kept*> items;
};

constexpr uint32_t kNowhere = UINT32_MAX;
PyTypeObject *kept_type = nullptr, *kept_list_type = nullptr;  // made once and never freed

KeptList* list_of(PyObject* chunk) {  // borrowed; nullptr: the chunk stays
  PyObject* list = classes->chunk.kept.of(chunk);
  return Py_IS_TYPE(list, kept_list_type) ? reinterpret_cast<KeptList*>(list) : nullptr;
}

bool may_leave(PyObject* chunk) { return classes->chunk.handles.of(chunk) != Py_None; }

Owned keep(Reference tensor, uint32_t version, PyObject* chunk) {
  Owned object = checked(_PyObject_New(kept_type));
  auto* kept = reinterpret_cast<Kept*>(object.get());
  new (&kept->tensor) Reference(std::move(tensor));
  kept->version = version;
  kept->place = kNowhere;
  kept->handle = nullptr;
  kept->chunk = Py_XNewRef(chunk);
  return object;
}

// Puts it into the list of its chunk.
void enlist(Kept* kept) {
  KeptList* list = list_of(kept->chunk);
  if (list == nullptr) {
    const Owned made = checked(_PyObject_New(kept_list_type));
    list = reinterpret_cast<KeptList*>(made.get());
    new (&list->items) std::vector<Kept*>();
    classes->chunk.kept.set(kept->chunk, made.get());
  }
  list->items.push_back(kept);
  kept->place = static_cast<uint32_t>(list->items.size() - 1);
}

void free_kept(PyObject* object) {
  auto* kept = reinterpret_cast<Kept*>(object);
  PyTypeObject* type = Py_TYPE(object);
  if (kept->place != kNowhere) list_of(kept->chunk)->items[kept->place] = nullptr;
  kept->tensor.~Reference();
  Py_XDECREF(kept->handle);
  Py_XDECREF(kept->chunk);
  PyObject_Free(object);
  Py_DECREF(type);
}

void free_kept_list(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<KeptList*>(object)->items.~vector();
  PyObject_Free(object);
  Py_DECREF(type);
}

// What the hooks in Python take in its place: a `SmallHandle` if its chunk may leave, which it is
// from then on, or a `Resident`.
Owned in_python(Kept* kept) {
  if (kept->handle != nullptr) return Owned(Py_NewRef(kept->handle));
  const Owned tensor = python_object(kept->tensor);
  const Owned version = checked(PyLong_FromUnsignedLong(kept->version));
  PyObject* chunk = kept->chunk == nullptr ? Py_None : kept->chunk;
  if (chunk == Py_None || !may_leave(chunk)) {
    return checked(PyTuple_Pack(3, tensor.get(), version.get(), chunk));
  }
  Owned handle = checked(classes->handle.type->tp_alloc(classes->handle.type, 0));
  if (kept->handle != nullptr) return Owned(Py_NewRef(kept->handle));  // while memory was collected
  classes->handle.alias.set(handle.get(), tensor.get());
  classes->handle.version.set(handle.get(), version.get());
  classes->handle.chunk.set(handle.get(), chunk);
  kept->handle = Py_NewRef(handle.get());
  kept->tensor.reset();
  return handle;
}

PyObject* kept_in_python(PyObject* kept, PyObject*) {
  try {
    return in_python(reinterpret_cast<Kept*>(kept)).release();
  } catch (const PythonError&) {
    return nullptr;
  }
}

// The handles of those that live, as `Chunk.living` returns them.
PyObject* living(PyObject* object, PyObject*) {
  const auto& items = reinterpret_cast<KeptList*>(object)->items;
  try {
    Owned handles = checked(PyList_New(0));
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i] == nullptr) continue;
      const Owned kept(Py_NewRef(reinterpret_cast<PyObject*>(items[i])));
      checked(PyList_Append(handles.get(), in_python(items[i]).get()));
    }
    return handles.release();
  } catch (const PythonError&) {
    return nullptr;
  }
}

PyTypeObject* make_type(const char* name, int num_bytes, destructor free, PyMethodDef* methods) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(free)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  const unsigned int flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  PyType_Spec spec = {name, num_bytes, 0, flags, slots};
  return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
}

void make_types() {
  static PyMethodDef kept_methods[] = {
      {"in_python", kept_in_python, METH_NOARGS, "The handle that the hooks in Python take."}, {}};
  static PyMethodDef list_methods[] = {
      {"living", living, METH_NOARGS, "The `SmallHandle` of each that lives."}, {}};
  kept_type = make_type("penstock.activations.Kept", sizeof(Kept), free_kept, kept_methods);
  kept_list_type =
      make_type("penstock.activations.KeptList", sizeof(KeptList), free_kept_list, list_methods);
}

// What the two hooks of one `Offload` share: a tuple, which the garbage collector can look into.
struct State {
  PyObject* items;

  PyObject* known() const { return PyTuple_GET_ITEM(items, 2); }    // `ModuleStorages.known`
  PyObject* filling() const { return PyTuple_GET_ITEM(items, 3); }  // `SmallSaves.filling`
  Py_ssize_t small_bytes() const { return PyLong_AsSsize_t(PyTuple_GET_ITEM(items, 4)); }
};
enum { kPack, kUnpack };  // the first two items: what decides on everything else

// ------------------------------------------------------------------------------- saving

// Whether the bytes of one storage are all there is to a tensor, by its dispatch keys.
bool is_plain(PyObject* tensor, const c10::TensorImpl& implementation) {
  static std::unordered_map<uint64_t, bool> kinds;
  const uint64_t keys = implementation.key_set().raw_repr();
  if (const auto kind = kinds.find(keys); kind != kinds.end()) return kind->second;
  const Owned answer = checked(PyObject_CallOneArg(classes->has_plain_storage, tensor));
  return kinds[keys] = answer.get() == Py_True;
}

// A storage's Python object lives as long as the storage, so another one has not taken its address.
bool is_known(State state, const Owned& key) {
  PyObject* weak = found(state.known(), key.get());
  return weak != nullptr && referent(weak) != nullptr;
}

void remember(State state, PyObject* tensor, const Owned& key) {
  if (is_known(state, key)) return;
  const Owned storage = classes->tensor.storage.call(tensor);
  const Owned weak = checked(PyWeakref_NewRef(storage.get(), nullptr));
  checked(PyDict_SetItem(state.known(), key.get(), weak.get()));
}

bool is_parameter(const at::TensorBase& tensor) {
  return tensor.requires_grad() && tensor.is_leaf();
}

bool is_view_of_parameter(const at::TensorBase& tensor) {
  return tensor.is_view() && is_parameter(tensor._base());
}

// Whether this is a small window on data that was not computed here, such as a data set.
bool is_window_on_input(const c10::TensorImpl& implementation, int64_t num_bytes) {
  if (implementation.requires_grad()) return false;
  int64_t reach = 0;
  for (int64_t i = 0; i < implementation.dim(); ++i) {
    reach += (implementation.size(i) - 1) * implementation.stride(i);
  }
  return 2 * (reach + 1) * static_cast<int64_t>(implementation.itemsize()) < num_bytes;
}

// Whether a tensor is on a device, a `torch.device`; the last answer is remembered.
bool is_on(PyObject* device, PyObject* tensor, const c10::TensorImpl& implementation) {
  static Owned last;
  static c10::Device last_device(c10::kCPU);
  if (last.get() == device && last_device == implementation.device()) return true;
  const Owned own = classes->tensor.device.of(tensor);
  if (!checked(PyObject_RichCompareBool(own.get(), device, Py_EQ))) return false;
  last = Owned(Py_NewRef(device));
  last_device = implementation.device();
  return true;
}

// The chunk that this thread is filling, if the tensor may be noted in it.
Owned open_chunk(
    State state, PyObject* tensor, const c10::TensorImpl& implementation, Py_ssize_t num_bytes) {
  const Owned thread = checked(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  PyObject* weak = found(state.filling(), thread.get());
  Owned chunk = weak == nullptr ? nullptr : referent(weak);
  if (chunk == nullptr || classes->chunk.used.is_true(chunk.get())) return nullptr;
  PyObject* record = classes->chunk.record.of(chunk.get());
  const Py_ssize_t sum = number(classes->record.small_bytes.of(record)) + num_bytes;
  if (sum > number(classes->chunk.capacity_bytes.of(chunk.get()))) return nullptr;
  return is_on(classes->record.device.of(record), tensor, implementation) ? std::move(chunk)
                                                                          : nullptr;
}

void count(const Owned& chunk, const Owned& key, Py_ssize_t num_bytes) {
  PyObject* record = classes->chunk.record.of(chunk.get());
  PyObject* keys = classes->record.small_keys.of(record);
  const Py_ssize_t before = PySet_GET_SIZE(keys);
  checked(PySet_Add(keys, key.get()));
  if (PySet_GET_SIZE(keys) == before) return;  // it is in there
  const Py_ssize_t sum = number(classes->record.small_bytes.of(record)) + num_bytes;
  classes->record.small_bytes.set(record, checked(PyLong_FromSsize_t(sum)).get());
}

Owned pack(State state, PyObject* tensor) {
  if (!classes->has_plain(tensor)) return nullptr;
  c10::TensorImpl& implementation = classes->tensor.implementation(tensor);
  if (!is_plain(tensor, implementation)) return nullptr;
  const c10::StorageImpl* storage = implementation.unsafe_storage().unsafeGetStorageImpl();
  const auto num_bytes = static_cast<Py_ssize_t>(storage->nbytes());
  const Owned key = checked(PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage)));
  const uint32_t version = implementation.version_counter().current_version();
  const Borrowed borrowed(implementation);
  const bool is_leaf = is_parameter(borrowed.tensor());
  const bool is_shown = is_leaf || is_view_of_parameter(borrowed.tensor());
  if (is_shown) remember(state, tensor, key);
  const bool stays = is_shown || is_known(state, key) ||
                     (num_bytes > 0 && is_window_on_input(implementation, num_bytes));
  if (!stays && !(num_bytes > 0 && num_bytes < state.small_bytes())) return nullptr;
  // Others than leaves may own the graph node that will own the handle. Before the chunk is looked
  // at, as it gives up the GIL.
  Reference alias = implementation.requires_grad() && !is_leaf
                        ? alias_of(implementation)
                        : Reference::reclaim_copy(&implementation);
  if (stays) return keep(std::move(alias), version, nullptr);
  const Owned chunk = open_chunk(state, tensor, implementation, num_bytes);
  if (chunk == nullptr) return nullptr;
  count(chunk, key, num_bytes);
  Owned kept = keep(std::move(alias), version, chunk.get());
  if (may_leave(chunk.get())) enlist(reinterpret_cast<Kept*>(kept.get()));
  return kept;
}

// ------------------------------------------------------------------------------- restoring

bool is_at(const c10::TensorImpl& implementation, unsigned long version) {
  return implementation.version_counter().current_version() == version;
}

// `chunk` and `version` may be None.
Owned unpack_python(PyObject* tensor, PyObject* version, PyObject* chunk) {
  if (chunk != Py_None && !classes->chunk.used.is_true(chunk)) return nullptr;
  if (version == Py_None || !classes->has_plain(tensor)) return nullptr;
  const c10::TensorImpl& implementation = classes->tensor.implementation(tensor);
  return is_at(implementation, PyLong_AsUnsignedLong(version)) ? Owned(Py_NewRef(tensor)) : nullptr;
}

Owned unpack_small(PyObject* handle) {
  return unpack_python(classes->handle.alias.of(handle), classes->handle.version.of(handle),
                       classes->handle.chunk.of(handle));
}

Owned unpack(State, PyObject* handle) {
  if (PyTuple_CheckExact(handle)) {  // a `Resident`
    return unpack_python(PyTuple_GET_ITEM(handle, 0), PyTuple_GET_ITEM(handle, 1),
                         PyTuple_GET_ITEM(handle, 2));
  }
  if (Py_IS_TYPE(handle, classes->handle.type)) return unpack_small(handle);
  if (!Py_IS_TYPE(handle, kept_type)) return nullptr;
  const auto& kept = *reinterpret_cast<Kept*>(handle);
  if (kept.handle != nullptr) return unpack_small(kept.handle);
  if (kept.chunk != nullptr && !classes->chunk.used.is_true(kept.chunk)) return nullptr;
  return is_at(*kept.tensor, kept.version) ? python_object(kept.tensor) : nullptr;
}

// ------------------------------------------------------------------------------- the hooks

template <Owned (*common)(State, PyObject*), int otherwise>
PyObject* hook(PyObject* items, PyObject* argument) {
  try {
    if (Owned result = common(State{items}, argument)) return result.release();
  } catch (const PythonError&) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // KeyboardInterrupt
    PyErr_Clear();
  } catch (const std::exception&) {  // of PyTorch's; it will raise it there as well
  }
  try {
    const Owned known = Py_IS_TYPE(argument, kept_type)
                            ? in_python(reinterpret_cast<Kept*>(argument))
                            : Owned(Py_NewRef(argument));
    return PyObject_CallOneArg(PyTuple_GET_ITEM(items, otherwise), known.get());
  } catch (const PythonError&) {
    return nullptr;
  }
}

PyMethodDef kPackMethod = {"pack", hook<pack, kPack>, METH_O, nullptr};
PyMethodDef kUnpackMethod = {"unpack", hook<unpack, kUnpack>, METH_O, nullptr};

}  // namespace

// The pair of hooks, which leave to the first two items of `state` what they do not do themselves.
extern "C" PyObject* penstock_common_saves(PyObject* types, PyObject* state) {
  try {
    if (classes == nullptr) {
      make_types();
      classes = new Classes(types);
    }
    const Owned module = checked(PyUnicode_FromString("penstock.activations"));  // named by Dynamo
    const Owned pack_hook = checked(PyCFunction_NewEx(&kPackMethod, state, module.get()));
    const Owned unpack_hook = checked(PyCFunction_NewEx(&kUnpackMethod, state, module.get()));
    return PyTuple_Pack(2, pack_hook.get(), unpack_hook.get());
  } catch (const PythonError&) {
    return nullptr;
  }
}
