// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/base/index.h>
#include <tessera/comm/devices.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/mesh/device_mesh_impl.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

namespace tessera {

namespace {

// "dp=2,tp=4"
std::string axes_text(const std::vector<Axis>& axes) {
  std::string text;
  for (const Axis& axis : axes) {
    text +=
        fmt::format("{}{}={}", text.empty() ? "" : ",", axis.name, axis.size);
  }
  return text;
}

std::string names_text(const std::vector<Axis>& axes) {
  std::string text;
  for (const Axis& axis : axes) {
    text += (text.empty() ? "" : ", ") + axis.name;
  }
  return text;
}

// Axes of the same names that fit: each keeps what divides the ranks that are
// left, and `rest` takes what nobody took.
std::string suggestion(std::vector<Axis> axes, size_t rest, int64_t ranks) {
  for (size_t i = 0; i < axes.size(); ++i) {
    if (i != rest) {
      axes[i].size = std::gcd(axes[i].size, ranks);
      ranks /= axes[i].size;
    }
  }
  axes[rest].size = ranks;
  return axes_text(axes);
}

void check_names(const std::vector<Axis>& axes) {
  if (axes.empty()) {
    throw UsageError("mesh without axes; give at least one, such as dp=1");
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].name.empty()) {
      throw UsageError(fmt::format(
          "mesh {}: axis {} has no name; name every axis", axes_text(axes), i));
    }
    for (size_t j = 0; j < i; ++j) {
      if (axes[i].name == axes[j].name) {
        throw UsageError(fmt::format(
            "mesh {}: two axes are named {}; names must differ",
            axes_text(axes),
            axes[i].name));
      }
    }
  }
}

// The position of the one axis of size -1, if there is one.
std::optional<size_t> checked_sizes(const std::vector<Axis>& axes) {
  std::optional<size_t> inferred;
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].size == -1 && inferred) {
      throw UsageError(fmt::format(
          "mesh {}: two sizes are -1; only one can be inferred",
          axes_text(axes)));
    }
    if (axes[i].size == -1) {
      inferred = i;
    } else if (axes[i].size < 1) {
      throw UsageError(fmt::format(
          "mesh {}: axis {} has size {}; sizes start at 1, and one may be -1",
          axes_text(axes),
          axes[i].name,
          axes[i].size));
    }
  }
  return inferred;
}

// The product of the sizes that are given, or the largest integer.
int64_t known_product(const std::vector<Axis>& axes) {
  int64_t product = 1;
  for (const Axis& axis : axes) {
    if (axis.size > 0 && __builtin_mul_overflow(product, axis.size, &product)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return product;
}

// Checks the axes against the number of ranks and fills in a size of -1.
std::vector<Axis> resolved(std::vector<Axis> axes, int64_t world_size) {
  check_names(axes);
  const std::optional<size_t> inferred = checked_sizes(axes);
  const int64_t product = known_product(axes);
  if (inferred ? world_size % product != 0 : product != world_size) {
    throw UsageError(fmt::format(
        "mesh {} needs {}{} ranks, world size is {}; try {}",
        axes_text(axes),
        inferred ? "a multiple of " : "",
        product,
        world_size,
        suggestion(axes, inferred.value_or(axes.size() - 1), world_size)));
  }
  if (inferred) {
    axes[*inferred].size = world_size / product;
  }
  return axes;
}

// Where `rank` stands in the mesh.
std::vector<int64_t> coordinates_of(
    const std::vector<Axis>& axes, int64_t index) {
  std::vector<int64_t> coordinates(axes.size());
  for (size_t axis = axes.size(); axis-- > 0;) {
    coordinates[axis] = index % axes[axis].size;
    index /= axes[axis].size;
  }
  return coordinates;
}

// The ranks met when the chosen axes take all their coordinates, row-major in
// the order of `chosen`, and the others stay at `coordinates`.
std::vector<int64_t> ranks_along(
    const std::vector<Axis>& axes,
    const std::vector<int64_t>& ranks,
    std::vector<int64_t> coordinates,
    const std::vector<size_t>& chosen) {
  std::vector<Axis> chosen_axes;
  int64_t count = 1;
  for (size_t axis : chosen) {
    chosen_axes.push_back(axes[axis]);
    count *= axes[axis].size;
  }
  std::vector<int64_t> result;
  for (int64_t i = 0; i < count; ++i) {
    const std::vector<int64_t> inner = coordinates_of(chosen_axes, i);
    int64_t index = 0;
    for (size_t c = 0; c < chosen.size(); ++c) {
      coordinates[chosen[c]] = inner[c];
    }
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      index = index * axes[axis].size + coordinates[axis];
    }
    result.push_back(ranks[at(index)]);
  }
  return result;
}

// Keeps meshes reachable for ever, and hands out their ids.
void keep(DeviceMeshImpl* mesh) {
  static std::mutex mutex;
  static auto& meshes = *new std::vector<DeviceMeshImpl*>();
  const std::scoped_lock lock(mutex);
  meshes.push_back(mesh);
  mesh->id = meshes.size();
}

// The meshes of one world, and the groups of their axes. Lives in the world's
// state. Whether a group is there is alike on all its members, since they made
// it together; whether a mesh is there need not be: submesh() is local.
class MeshTable {
 public:
  MeshTable() = default;
  MeshTable(const MeshTable&) = delete;
  MeshTable& operator=(const MeshTable&) = delete;
  ~MeshTable() {
    for (auto& [key, mesh] : meshes_) {
      mesh->groups.clear();
      mesh->world = World();
    }
  }

  const DeviceMeshImpl* find(
      const std::vector<Axis>& axes,
      const std::vector<int64_t>& ranks,
      c10::DeviceType device) {
    const std::scoped_lock lock(mutex_);
    const auto it = meshes_.find(key_of(axes, ranks, device));
    return it == meshes_.end() ? nullptr : it->second;
  }

  // The mesh that is kept: `mesh`, or an equal one that came first.
  const DeviceMeshImpl* insert(std::unique_ptr<DeviceMeshImpl> mesh) {
    const std::scoped_lock lock(mutex_);
    const auto [it, fresh] = meshes_.try_emplace(
        key_of(mesh->axes, mesh->ranks, mesh->device.type()), mesh.get());
    if (fresh) {
      keep(mesh.release());
    }
    return it->second;
  }

  // Collective over the ranks when they have no such group yet.
  Group group(
      const World& world,
      const std::vector<int64_t>& ranks,
      const std::string& name,
      c10::DeviceType device) {
    const std::scoped_lock lock(groups_mutex_);
    const std::tuple key(name, ranks, device);
    auto it = groups_.find(key);
    if (it == groups_.end()) {
      it = groups_.emplace(key, world.new_group(ranks, name, device)).first;
    }
    return it->second;
  }

 private:
  using Key = std::pair<
      c10::DeviceType,
      std::pair<
          std::vector<std::pair<std::string, int64_t>>,
          std::vector<int64_t>>>;

  static Key key_of(
      const std::vector<Axis>& axes,
      const std::vector<int64_t>& ranks,
      c10::DeviceType device) {
    std::vector<std::pair<std::string, int64_t>> named;
    named.reserve(axes.size());
    for (const Axis& axis : axes) {
      named.emplace_back(axis.name, axis.size);
    }
    return {device, {std::move(named), ranks}};
  }

  std::mutex mutex_;
  std::map<Key, DeviceMeshImpl*> meshes_;
  std::mutex groups_mutex_;
  std::
      map<std::tuple<std::string, std::vector<int64_t>, c10::DeviceType>, Group>
          groups_;
};

std::vector<int64_t> iota(int64_t count) {
  std::vector<int64_t> values(at(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

void add_groups(DeviceMeshImpl& mesh, MeshTable& table) {
  for (size_t axis = 0; axis < mesh.axes.size(); ++axis) {
    const std::vector<int64_t> members =
        ranks_along(mesh.axes, mesh.ranks, mesh.coordinates, {axis});
    mesh.groups.push_back(table.group(
        mesh.world, members, mesh.axes[axis].name, mesh.device.type()));
    mesh.backend_names.push_back(mesh.groups.back().backend_name());
  }
}

[[noreturn]] void throw_worldless(const DeviceMesh& mesh) {
  throw UsageError(fmt::format(
      "{}: its world has ended, or it was only described; keep the World alive "
      "as long as its meshes communicate",
      mesh.str()));
}

} // namespace

const World& DeviceMesh::world() const {
  if (!impl_->world) {
    throw_worldless(*this);
  }
  return impl_->world;
}

int64_t DeviceMesh::ndim() const {
  return static_cast<int64_t>(impl_->axes.size());
}

int64_t DeviceMesh::size() const {
  return static_cast<int64_t>(impl_->ranks.size());
}

int64_t DeviceMesh::size(int64_t axis) const {
  return impl_->axes[at(axis)].size;
}

const std::vector<Axis>& DeviceMesh::axes() const {
  return impl_->axes;
}

int64_t DeviceMesh::axis_index(std::string_view name) const {
  for (int64_t axis = 0; axis < ndim(); ++axis) {
    if (impl_->axes[at(axis)].name == name) {
      return axis;
    }
  }
  throw UsageError(fmt::format(
      "{} has no axis named {}; its axes are {}",
      str(),
      name,
      names_text(impl_->axes)));
}

int64_t DeviceMesh::coordinate(int64_t axis) const {
  return impl_->coordinates[at(axis)];
}

const std::vector<int64_t>& DeviceMesh::coordinates() const {
  return impl_->coordinates;
}

const std::vector<int64_t>& DeviceMesh::ranks() const {
  return impl_->ranks;
}

const Group& DeviceMesh::group(int64_t axis) const {
  if (impl_->groups.empty()) {
    throw_worldless(*this);
  }
  return impl_->groups[at(axis)];
}

const std::string& DeviceMesh::backend_name(int64_t axis) const {
  return impl_->backend_names[at(axis)];
}

c10::DeviceType DeviceMesh::device_type() const {
  return impl_->device.type();
}

c10::Device DeviceMesh::device() const {
  return impl_->device;
}

uint64_t DeviceMesh::id() const {
  return impl_->id;
}

DeviceMesh DeviceMesh::submesh(
    const std::vector<std::string>& axis_names) const {
  std::vector<size_t> chosen;
  auto mesh = std::make_unique<DeviceMeshImpl>();
  for (const std::string& name : axis_names) {
    chosen.push_back(at(axis_index(name)));
    mesh->axes.push_back(impl_->axes[chosen.back()]);
    mesh->coordinates.push_back(impl_->coordinates[chosen.back()]);
    mesh->backend_names.push_back(impl_->backend_names[chosen.back()]);
  }
  check_names(mesh->axes);
  mesh->ranks =
      ranks_along(impl_->axes, impl_->ranks, impl_->coordinates, chosen);
  mesh->device = impl_->device;
  mesh->world = world();
  for (size_t axis : chosen) {
    mesh->groups.push_back(impl_->groups[axis]);
  }
  return DeviceMesh(world().state<MeshTable>().insert(std::move(mesh)));
}

std::string DeviceMesh::str() const {
  std::string text;
  for (const Axis& axis : impl_->axes) {
    text +=
        fmt::format("{}{}={}", text.empty() ? "" : ", ", axis.name, axis.size);
  }
  return "mesh(" + text + ")";
}

DeviceMesh make_mesh(
    const World& world, const std::vector<Axis>& axes, c10::DeviceType device) {
  auto mesh = std::make_unique<DeviceMeshImpl>();
  mesh->axes = resolved(axes, world.size());
  mesh->ranks = iota(world.size());
  MeshTable& table = world.state<MeshTable>();
  mesh->coordinates = coordinates_of(mesh->axes, world.rank());
  mesh->device = world.device(device);
  make_current(mesh->device);
  mesh->world = world.unowned();
  add_groups(*mesh, table);
  return DeviceMesh(table.insert(std::move(mesh)));
}

DeviceMesh describe_mesh(
    const std::vector<Axis>& axes,
    int64_t rank,
    const std::string& backend_name,
    c10::DeviceType device) {
  auto mesh = std::make_unique<DeviceMeshImpl>();
  check_names(axes);
  if (checked_sizes(axes) || rank < 0 || rank >= known_product(axes)) {
    throw UsageError(fmt::format(
        "describe_mesh {}: rank {} of {}; give all sizes, and a rank below "
        "their product",
        axes_text(axes),
        rank,
        known_product(axes)));
  }
  mesh->axes = axes;
  mesh->ranks = iota(known_product(axes));
  mesh->coordinates = coordinates_of(axes, rank);
  mesh->device = c10::Device(
      device, static_cast<c10::DeviceIndex>(device == c10::kCPU ? -1 : 0));
  for (const Axis& axis : axes) {
    mesh->backend_names.push_back(axis.size == 1 ? "single" : backend_name);
  }
  keep(mesh.get());
  return DeviceMesh(mesh.release());
}

std::vector<Axis> parse_axes(std::string_view text) {
  std::vector<Axis> axes;
  const std::string whole(text);
  for (bool more = true; more;) {
    const size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    const size_t equals = item.find('=');
    int64_t size = 0;
    const char* end = item.data() + item.size();
    const bool split = equals != std::string_view::npos;
    const auto parsed =
        std::from_chars(split ? item.data() + equals + 1 : end, end, size);
    if (!split || parsed.ec != std::errc() || parsed.ptr != end) {
      throw UsageError(fmt::format(
          "mesh \"{}\": \"{}\" is not name=size; write it like dp=2,tp=4",
          whole,
          item));
    }
    axes.push_back({std::string(item.substr(0, equals)), size});
    more = comma != std::string_view::npos;
    text.remove_prefix(more ? comma + 1 : text.size());
  }
  check_names(axes);
  checked_sizes(axes);
  return axes;
}

} // namespace tessera
