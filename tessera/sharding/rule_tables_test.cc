// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/sharding/families.h>
#include <tessera/sharding/propagate.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <set>

namespace tessera::rules {
namespace {

std::optional<c10::OperatorHandle> find(const std::string& name) {
  const size_t dot = name.find('.');
  const std::string overload =
      dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema(
      {"aten::" + name.substr(0, dot), overload});
}

bool is_tensor(const c10::Argument& argument) {
  const std::string type = argument.type()->str();
  return type == "Tensor" || type == "Tensor?";
}

bool is_list(const c10::Argument& argument) {
  return argument.type()->str() == "Tensor[]";
}

bool is_out(const c10::Argument& argument) {
  return argument.is_out();
}

size_t read_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return static_cast<size_t>(
      std::count_if(arguments.begin(), arguments.end(), [](const auto& a) {
        return (is_tensor(a) || is_list(a)) && !is_out(a);
      }));
}

// Calls `visit(table, row, name, schema)` for every operator with a row.
template <typename Visit>
void for_each_operator(Visit&& visit) {
  for (const Table* table : tables()) {
    for (const Row& row : table->rows) {
      for (const std::string& name : expand_names(row.ops)) {
        const auto handle = find(name);
        if (handle) {
          visit(*table, row, name, handle->schema());
        }
      }
    }
  }
}

TEST(RuleTables, NameOnlyOperatorsThatExist) {
  size_t count = 0;
  for (const Table* table : tables()) {
    for (const Row& row : table->rows) {
      for (const std::string& name : expand_names(row.ops)) {
        EXPECT_TRUE(find(name).has_value())
            << name << " in family " << table->family;
        EXPECT_TRUE(has_rule("aten::" + name));
        ++count;
      }
    }
  }
  EXPECT_GT(count, 700u);
}

TEST(RuleTables, EinsumNotationHasOneItemPerTensorArgument) {
  for_each_operator([](const Table& table,
                       const Row& row,
                       const std::string& name,
                       const c10::FunctionSchema& schema) {
    if (table.family == "einsum") {
      const auto arguments = row.notation.substr(0, row.notation.find("->"));
      EXPECT_EQ(
          static_cast<size_t>(
              std::count(arguments.begin(), arguments.end(), ',')) +
              1,
          read_tensors(schema))
          << name;
    }
  });
}

TEST(RuleTables, LinearGroupsNumberTensorArguments) {
  for_each_operator([](const Table& /*table*/,
                       const Row& row,
                       const std::string& name,
                       const c10::FunctionSchema& schema) {
    for (const char c : row.linear) {
      EXPECT_TRUE(
          c == ',' || static_cast<size_t>(c - '0') < read_tensors(schema))
          << name;
    }
  });
}

TEST(RuleTables, ArgumentPositionsNameArgumentsOfTheirKind) {
  for_each_operator([](const Table& table,
                       const Row& row,
                       const std::string& name,
                       const c10::FunctionSchema& schema) {
    const auto at = [&](int64_t i) {
      return schema.arguments().at(static_cast<size_t>(i));
    };
    if (row.dims >= 0 && table.family != "loss") {
      static const std::set<std::string> kNames{
          "dim",
          "dims",
          "dim0",
          "normalized_shape",
          "num_weights",
          "size",
          "shape",
          "dimension"};
      EXPECT_TRUE(kNames.contains(at(row.dims).name()))
          << name << ": " << at(row.dims).name();
    }
    if (row.dims >= 0 && table.family == "loss") {
      EXPECT_EQ(at(row.dims).name(), "reduction") << name;
    }
    if (row.keepdim >= 0) {
      EXPECT_EQ(at(row.keepdim).name(), "keepdim") << name;
    }
    if (row.decides >= 0) {
      const std::string type = at(row.decides).type()->str();
      EXPECT_TRUE(type == "Scalar" || type == "Scalar?")
          << name << ": " << type;
    }
  });
}

TEST(RuleTables, CountResultsAsSchemasDo) {
  for_each_operator([](const Table& table,
                       const Row& row,
                       const std::string& name,
                       const c10::FunctionSchema& schema) {
    const auto& returns = schema.returns();
    const bool writes = std::any_of(
        schema.arguments().begin(),
        schema.arguments().end(),
        [](const auto& a) {
          return a.alias_info() != nullptr && a.alias_info()->isWrite();
        });
    if (table.family == "view" || table.family == "zip" || writes ||
        table.family == "loss") {
      return;
    }
    const auto tensors =
        std::count_if(returns.begin(), returns.end(), [](const auto& r) {
          return r.type()->str() == "Tensor";
        });
    if (table.family == "einsum") {
      const auto results = row.notation.substr(row.notation.find("->") + 2);
      const auto items = std::count(results.begin(), results.end(), ',') + 1;
      EXPECT_EQ(tensors, row.results == 0 ? 0 : items) << name;
    } else {
      EXPECT_EQ(tensors, row.results) << name;
    }
  });
}

} // namespace
} // namespace tessera::rules
