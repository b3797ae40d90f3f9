// SPDX-License-Identifier: Apache-2.0
// Never part of anything: linked with the objects of `base` alone it must fail,
// since `init` belongs to a later room.
#include <tessera/comm/world.h>

tessera::World against_the_order() {
  return tessera::init();
}
