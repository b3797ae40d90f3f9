// SPDX-License-Identifier: Apache-2.0
#include <tessera/sharding/families.h>

#include <stdexcept>
#include <unordered_map>

namespace tessera::rules {

std::vector<std::string> expand_names(std::string_view ops) {
  std::vector<std::string> names;
  const size_t open = ops.find('{');
  if (open == std::string_view::npos) {
    return {std::string(ops)};
  }
  const size_t close = ops.find('}', open);
  std::string_view inner = ops.substr(open + 1, close - open - 1);
  while (true) {
    const size_t comma = inner.find(',');
    names.push_back(
        std::string(ops.substr(0, open)) + std::string(inner.substr(0, comma)) +
        std::string(ops.substr(close + 1)));
    if (comma == std::string_view::npos) {
      return names;
    }
    inner.remove_prefix(comma + 1);
  }
}

std::vector<const Table*> tables() {
  return {
      &einsum_table(),
      &pointwise_table(),
      &locked_table(),
      &view_table(),
      &reduction_table(),
      &loss_table(),
      &factory_table(),
      &random_table(),
      &index_table(),
      &zip_table(),
      &join_table()};
}

namespace {

std::unordered_map<std::string, Rule> build_registry() {
  std::unordered_map<std::string, Rule> registry;
  for (const Table* table : tables()) {
    for (const Row& row : table->rows) {
      for (const std::string& name : expand_names(row.ops)) {
        if (!registry.emplace("aten::" + name, Rule{table, &row}).second) {
          throw std::logic_error(
              "aten::" + name + " has two rows in the rule tables");
        }
      }
    }
  }
  return registry;
}

} // namespace

const Rule* find_rule(std::string_view op) {
  static const std::unordered_map<std::string, Rule> registry =
      build_registry();
  const auto found = registry.find(std::string(op));
  return found == registry.end() ? nullptr : &found->second;
}

void set_linear(Line& line, std::string_view groups) {
  std::vector<int> group;
  const auto finish = [&] {
    if (!group.empty()) {
      line.linear.push_back(group);
    }
    group.clear();
  };
  for (const char c : groups) {
    const int operand = c - '0';
    if (c == ',') {
      finish();
    } else if (
        operand < static_cast<int>(line.operands.size()) &&
        line.operands[static_cast<size_t>(operand)].spec != nullptr) {
      group.push_back(operand);
    }
  }
  finish();
}

} // namespace tessera::rules
