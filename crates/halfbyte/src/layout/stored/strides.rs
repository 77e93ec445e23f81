//! Where files keep numbers of groups.

/// Where a slice keeps the value of output i and group g: at `i · output + g · group`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From an output to the next.
    pub output: usize,
    /// From a group to the next.
    pub group: usize,
}

impl Strides {
    /// One value for the whole tensor.
    pub const TENSOR: Self = Self { output: 0, group: 0 };

    /// Of a matrix `[n, groups]`.
    pub fn of_outputs(groups: usize) -> Self {
        Self { output: groups, group: 1 }
    }

    /// Of a matrix `[groups, n]`.
    pub fn of_groups(n: usize) -> Self {
        Self { output: 1, group: n }
    }

    /// Where the value of output `i` and group `g` lies. Panics or wraps beyond `usize`, where no slice has one.
    pub fn at(self, i: usize, g: usize) -> usize {
        i * self.output + g * self.group
    }

    /// Elements that a slice must have for all outputs and groups; None if no slice can.
    pub(super) fn needs(self, n: usize, groups: usize) -> Option<usize> {
        if n == 0 || groups == 0 {
            return Some(0);
        }
        (n - 1).checked_mul(self.output)?.checked_add((groups - 1).checked_mul(self.group)?)?.checked_add(1)
    }
}
