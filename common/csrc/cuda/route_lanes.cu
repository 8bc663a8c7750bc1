#include "route.cuh"
namespace duomoe::cuda {
bool launch_route_lanes(Queue&, const Route&, int64_t) { return false; }
}
