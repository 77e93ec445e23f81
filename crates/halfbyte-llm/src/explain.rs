//! What the products of a model are computed by, as it was decided when the model was loaded.

use halfbyte::kernel::Problem;

/// Products of one shape.
#[derive(Clone, Debug)]
pub struct Product {
    /// Format, types and shape, for one row.
    pub problem: Problem,
    /// How many of the model's products have it.
    pub count: usize,
    /// What numbers of rows are computed by, in order.
    pub plans: Vec<PlanOfRows>,
}

/// What some numbers of rows are computed by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanOfRows {
    /// The fewest and the most rows.
    pub rows: [usize; 2],
    /// The kernel.
    pub kernel: &'static str,
    /// How it computes them, where it has several ways.
    pub configuration: String,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
}

/// Adds a product, or counts it with those that are alike.
pub(crate) fn add(products: &mut Vec<Product>, problem: Problem, plans: Vec<PlanOfRows>) {
    match products.iter_mut().find(|known| known.problem == problem && known.plans == plans) {
        Some(known) => known.count += 1,
        None => products.push(Product { problem, count: 1, plans }),
    }
}
