// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/sharding/line.h>
#include <tessera/sharding/op_call.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::rules {

// One line of a rule table. Which of the fields a family reads stands beside
// its table.
struct Row {
  // Operators with overload, without "aten::". Braces hold alternatives:
  // "add{.Tensor,_.Tensor}" is add.Tensor and add_.Tensor.
  std::string_view ops;
  std::string_view notation = {}; // einsum-like, see einsum.cc
  std::string_view linear = {}; // groups of tensor arguments by number: "01"
                                // jointly linear in both, "0,1" linear in each
  int64_t dims = -1; // schema position of the dim or dims
  int64_t keepdim = -1; // schema position
  int64_t decides = -1; // schema position of the Scalar whose value matters
  int mode = 0; // of the family's own enumeration
  bool zeros_if_empty = false; // libtorch's kernel fails on an operand without
                               // an element (LocalKernel::kZerosIfEmpty)
  int results = 1;
};

// A part of a call that is decided by itself: element i of every list of a
// foreach operator.
struct Part {
  Line line;
  std::vector<size_t> positions; // of its operands among Decision::inputs
};

// A family: how its rows and a call make a line (or parts with a line each),
// and the rows.
struct Table {
  std::string_view family;
  Line (*build)(const Row&, const OpCall&);
  std::vector<Part> (*parts)(const Row&, const OpCall&);
  std::span<const Row> rows;
};

const Table& einsum_table();
const Table& pointwise_table();
const Table& locked_table();
const Table& view_table();
const Table& reduction_table();
const Table& loss_table();
const Table& factory_table();
const Table& random_table();
const Table& index_table();
const Table& zip_table();
const Table& join_table();

// All families.
std::vector<const Table*> tables();

struct Rule {
  const Table* table;
  const Row* row;
};

// The row of an operator ("aten::mm"); null without one.
const Rule* find_rule(std::string_view op);

// What the braces of Row::ops stand for.
std::vector<std::string> expand_names(std::string_view ops);

// The pointwise family's line over the given operands of a call: broadcasting,
// no reduction. Used by families that refine it.
Line broadcast_line(std::vector<Operand> operands, int results);

// Sets Line::linear from a row's groups; groups that name an absent operand are
// cut down to the present ones.
void set_linear(Line& line, std::string_view groups);

} // namespace tessera::rules
