#include "runtime/checkpoints.h"

#include <algorithm>
#include <limits>
#include <map>

namespace delta {

bool CheckpointStore::Place::owned_by(int32_t slot) const {
    return std::find(owners.begin(), owners.end(), slot) != owners.end();
}

size_t CheckpointStore::count(int32_t slot) const {
    return static_cast<size_t>(std::count_if(places_.begin(), places_.end(), [&](const Place& p) { return p.owned_by(slot); }));
}

size_t CheckpointStore::count() const {
    return static_cast<size_t>(std::count_if(places_.begin(), places_.end(), [](const Place& p) { return !p.owners.empty(); }));
}

CheckpointStore::Place* CheckpointStore::find(int32_t slot, size_t position) {
    for (Place& place : places_) {
        if (place.position == position && place.owned_by(slot)) {
            return &place;
        }
    }
    return nullptr;
}

bool CheckpointStore::has(int32_t slot, size_t position) const {
    return std::any_of(places_.begin(), places_.end(),
                       [&](const Place& p) { return p.position == position && p.owned_by(slot); });
}

size_t CheckpointStore::newest(int32_t slot, size_t limit) const {
    size_t best = 0;
    for (const Place& place : places_) {
        if (place.position <= limit && place.owned_by(slot)) {
            best = std::max(best, place.position);
        }
    }
    return best;
}

void CheckpointStore::save(int32_t slot, size_t position, const uint8_t* recurrent) {
    if (places_.empty() || has(slot, position)) {
        return;
    }
    std::vector<int32_t> owners{slot};  // before a place is taken: nothing after it can fail
    const size_t index = take_place(slot, position);
    backend_.copy(data(index), recurrent, bytes_each_);
    places_[index].position = position;
    places_[index].owners.swap(owners);
    places_[index].used = ++clock_;
}

void CheckpointStore::restore(int32_t slot, size_t position, uint8_t* recurrent) {
    Place* place = find(slot, position);
    backend_.copy(recurrent, data(static_cast<size_t>(place - places_.data())), bytes_each_);
    place->used = ++clock_;
}

void CheckpointStore::drop_beyond(int32_t slot, size_t position) {
    for (Place& place : places_) {
        if (place.position > position) {
            std::erase(place.owners, slot);
        }
    }
}

void CheckpointStore::drop_all(int32_t slot) {
    for (Place& place : places_) {
        std::erase(place.owners, slot);
    }
}

void CheckpointStore::share(int32_t from, int32_t to) {
    for (Place& place : places_) {
        if (place.owned_by(from)) {
            place.owners.push_back(to);
        }
    }
}

size_t CheckpointStore::take_place(int32_t slot, size_t position) {
    for (size_t i = 0; i < places_.size(); ++i) {
        if (places_[i].owners.empty()) {
            return i;
        }
    }
    const size_t victim = victim_of(slot, position);
    places_[victim].owners.clear();
    return victim;
}

// The session with the most checkpoints gives one up, where `slot` counts the one it is about to get. The newest of a session is kept;
// of the others that one goes whose neighbours lie closest together in proportion to its distance from the end: a timeline is most
// often changed near its end, so older checkpoints may lie further apart. A session with a single one loses it only when no session
// has two; then the place unused for the longest time goes.
size_t CheckpointStore::victim_of(int32_t slot, size_t position_now) const {
    struct Holding {
        size_t count = 0;
        size_t newest = 0;
    };
    std::map<int32_t, Holding> sessions;
    for (const Place& place : places_) {
        for (const int32_t owner : place.owners) {
            Holding& holding = sessions[owner];
            ++holding.count;
            holding.newest = std::max(holding.newest, place.position);
        }
    }
    sessions[slot].count += 1;
    sessions[slot].newest = position_now;
    int32_t loser = slot;  // among equals, the one that asks
    for (const auto& [owner, holding] : sessions) {
        if (holding.count > sessions[loser].count) {
            loser = owner;
        }
    }

    std::vector<size_t> chain;  // places of the loser, by position
    for (size_t i = 0; i < places_.size(); ++i) {
        if (places_[i].owned_by(loser)) {
            chain.push_back(i);
        }
    }
    std::sort(chain.begin(), chain.end(), [&](size_t a, size_t b) { return places_[a].position < places_[b].position; });
    if (sessions[loser].count < 2) {
        const auto oldest =
            std::min_element(places_.begin(), places_.end(), [](const Place& a, const Place& b) { return a.used < b.used; });
        return static_cast<size_t>(oldest - places_.begin());
    }

    const size_t end = sessions[loser].newest;
    size_t victim = chain.front();
    double densest = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < chain.size(); ++i) {
        const Place& place = places_[chain[i]];
        if (std::any_of(place.owners.begin(), place.owners.end(),
                        [&](int32_t o) { return sessions[o].newest == place.position; })) {
            continue;
        }
        const size_t before = i == 0 ? 0 : places_[chain[i - 1]].position;
        const size_t after = i + 1 < chain.size() ? places_[chain[i + 1]].position : end;
        const double spread = static_cast<double>(after - before) / static_cast<double>(end - place.position + 1);
        if (spread < densest) {
            densest = spread;
            victim = chain[i];
        }
    }
    return victim;
}

}  // namespace delta
