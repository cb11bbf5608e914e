// Sums of columns as a library of their own; after `columns.cpp`.

extern "C" void penstock_column_reduce(const char* arguments) {
  const ColumnCall& call = *reinterpret_cast<const ColumnCall*>(arguments);
  if (call.kind == 3) {
    add_columns<double>(call);
  } else {
    add_columns<float>(call);
  }
}
