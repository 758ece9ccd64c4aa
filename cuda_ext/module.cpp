// An empty Python module, by which Python finds and packages the library; loading it registers the ops.

#include <Python.h>

#ifndef SPARSE_RL_SCHEMA
#error "SPARSE_RL_SCHEMA is set by setup.py"
#endif

// Read from the file before it is loaded: a library built for other schemas must not be called.
extern "C" __attribute__((used, visibility("default"))) const char sparse_rl_schema[] =
    "sparse_rl_schema=" SPARSE_RL_SCHEMA;

#ifdef SPARSE_RL_ARCHS
// What `sparse-rl doctor` says the library was compiled for.
extern "C" __attribute__((used, visibility("default"))) const char sparse_rl_archs[] =
    "sparse_rl_archs=" SPARSE_RL_ARCHS;
#endif

#define SPARSE_RL_INIT_(name) PyInit_##name
#define SPARSE_RL_INIT(name) SPARSE_RL_INIT_(name)
#define SPARSE_RL_TEXT_(name) #name
#define SPARSE_RL_TEXT(name) SPARSE_RL_TEXT_(name)

extern "C" __attribute__((visibility("default"))) PyObject* SPARSE_RL_INIT(SPARSE_RL_MODULE)(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, SPARSE_RL_TEXT(SPARSE_RL_MODULE), nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
