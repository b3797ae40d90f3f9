// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tessera/optim/bucket_state.h>
#include <tessera/optim/flat_bucket.h>
#include <tessera/optim/optimizer_state.h>
#include <tessera/optim/update_rule.h>

#include <vector>

namespace tessera {

// The whole state of one slot's parameter, from the ranks' shares of it; every
// rank gets it. `fields` are those of the rule. Collective over the mesh.
ParameterState whole_state(
    const FlatBucket& bucket,
    const BucketSlot& slot,
    const BucketState& kept,
    const std::vector<StateField>& fields);

// The other way: this rank's share of a whole state goes to where the slot's
// state lives. Not collective.
void place_state(
    const ParameterState& loaded,
    const FlatBucket& bucket,
    BucketSlot& slot,
    BucketState& kept,
    const std::vector<StateField>& fields);

} // namespace tessera
