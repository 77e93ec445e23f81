//! The same numbers in another format: exactly, or not at all.

use super::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::error::{Error, Result};
use crate::memory::room;
use std::borrow::Cow;

const OP: &str = "express in another format";

/// What a group of one row means: `scale · (code − zero)`, or `scale · code + offset`.
#[derive(Clone, Copy, PartialEq)]
struct Params {
    scale: f32,
    zero: ZeroOf,
}

#[derive(Clone, Copy, PartialEq)]
enum ZeroOf {
    Point(i32),
    Offset(f32),
}

impl QTensor {
    /// The tensor in another format, such that every weight stands for exactly the same number.
    ///
    /// Scales keep their values and codes their distance from zero. Bits may grow, or shrink where the codes allow it;
    /// groups may be divided, or joined where neighbours have the same scale and zero; scales may change their type
    /// where they are exact in the other; zero points, offsets and none at all may change into each other where that
    /// is exact. A group index stays where the groups stay. *Errors:* the first number that the format cannot hold, with
    /// its row and group; memory that is short.
    pub fn express(&self, target: WeightFormat) -> Result<Cow<'_, QTensor>> {
        target.validate()?;
        let source = self.format();
        if source == target {
            return Ok(Cow::Borrowed(self));
        }
        let (n, k) = (self.n(), self.k());
        let columns = Columns::of(self, target.group)?;
        let groups = columns.sources.len();
        let (mut codes, mut scales) = (room(OP, n * k)?, room(OP, n * groups)?);
        let of_groups = |zero: Zero| if target.zero == zero { n * groups } else { 0 };
        let (mut points, mut offsets) = (room(OP, of_groups(Zero::Integer))?, room(OP, of_groups(Zero::Float))?);
        // What is added to the codes of each group.
        let mut shifts = vec![0i32; groups];
        for i in 0..n {
            for g in 0..groups {
                let params = columns.params(self, i, g)?;
                if target.scale.round(params.scale) != params.scale {
                    return Err(refuse(format!("scales exact in {}", target.scale), params.scale, i, g));
                }
                scales.push(params.scale);
                let (shift, zero) = rebase(params, target, i, g)?;
                shifts[g] = shift;
                match zero {
                    None => {}
                    Some(ZeroOf::Point(zero)) => points.push(zero as u16),
                    Some(ZeroOf::Offset(offset)) => offsets.push(offset),
                }
            }
            let row = &self.codes()[i * k..(i + 1) * k];
            for (j, &code) in row.iter().enumerate() {
                let g = columns.group_of[j] as usize;
                let moved = i32::from(code) + shifts[g];
                if moved < 0 || moved > target.max_code() as i32 {
                    return Err(refuse(format!("codes of {} bits", target.bits), moved as f32, i, g));
                }
                codes.push(moved as u8);
            }
        }
        let zeros = match target.zero {
            Zero::Symmetric => Zeros::Symmetric,
            Zero::Integer => Zeros::Integer(points),
            Zero::Float => Zeros::Float(offsets),
        };
        let index = self.group_index().is_some().then_some(columns.group_of);
        QTensor::new(target, [n, k], codes, scales, zeros, index).map(Cow::Owned)
    }

    fn params(&self, i: usize, g: usize) -> Params {
        let at = i * self.groups() + g;
        let zero = match self.zeros() {
            Zeros::Symmetric => ZeroOf::Point(self.format().middle() as i32),
            Zeros::Integer(points) => ZeroOf::Point(i32::from(points[at])),
            Zeros::Float(offsets) => ZeroOf::Offset(offsets[at]),
        };
        Params { scale: self.scales()[at], zero }
    }
}

/// How the groups of the target lie in those of the source.
struct Columns {
    /// Group of each column in the target.
    group_of: Vec<u32>,
    /// For each group of the target the groups of the source that it takes columns from.
    sources: Vec<Vec<u32>>,
}

impl Columns {
    fn of(q: &QTensor, target: Group) -> Result<Self> {
        let (k, source) = (q.k(), q.format().group);
        // A part of a matrix may name more groups than its columns fill.
        let kept = target == source && q.group_index().is_some();
        let (count, len) = (if kept { q.groups() } else { target.count(k) }, target.len(k).max(1));
        let same = count == q.groups() && len == source.len(k).max(1);
        if q.group_index().is_some() && !same && count > 1 {
            let got = "columns that are grouped in another order (act-order)";
            return Err(Error::invalid(OP, "groups of neighbouring columns", got));
        }
        let keep = same && q.group_index().is_some();
        let group_of: Vec<u32> = (0..k).map(|j| (if keep { q.group_of(j) } else { j / len }) as u32).collect();
        let mut sources = vec![Vec::new(); count];
        for (j, &g) in group_of.iter().enumerate() {
            let from = q.group_of(j) as u32;
            let of_group: &mut Vec<u32> = &mut sources[g as usize];
            if of_group.last() != Some(&from) && !of_group.contains(&from) {
                of_group.push(from);
            }
        }
        // A group without columns still has a scale.
        for (g, of_group) in sources.iter_mut().enumerate() {
            if of_group.is_empty() {
                of_group.push(g.min(q.groups() - 1) as u32);
            }
        }
        Ok(Self { group_of, sources })
    }

    /// The scale and zero of a group of the target. Error: the groups that it joins do not agree.
    fn params(&self, q: &QTensor, i: usize, g: usize) -> Result<Params> {
        let sources = &self.sources[g];
        let params = q.params(i, sources[0] as usize);
        if let Some(other) = sources.iter().map(|&s| q.params(i, s as usize)).find(|&other| other != params) {
            let what = if other.scale == params.scale {
                "groups with equal zeros where they are joined".to_owned()
            } else {
                format!("groups with equal scales where they are joined, as {}", params.scale)
            };
            return Err(refuse(what, other.scale, i, g));
        }
        Ok(params)
    }
}

/// What to add to a group's codes, and its zero in the target.
fn rebase(params: Params, target: WeightFormat, i: usize, g: usize) -> Result<(i32, Option<ZeroOf>)> {
    let Params { scale, zero } = params;
    let point = match zero {
        ZeroOf::Point(point) => Some(point),
        ZeroOf::Offset(_) if target.zero == Zero::Float => None,
        ZeroOf::Offset(offset) => {
            let point = match (scale, offset) {
                (_, 0.0) => 0.0,
                (0.0, _) => return Err(refuse("an offset of 0 where the scale is 0".into(), offset, i, g)),
                _ => -f64::from(offset) / f64::from(scale),
            };
            // The quotient may have been rounded to a whole number; the product of two floats is exact.
            if point.fract() != 0.0 || point * f64::from(scale) != -f64::from(offset) || point.abs() > 1e6 {
                return Err(refuse("offsets that are whole multiples of the scale".into(), offset, i, g));
            }
            Some(point as i32)
        }
    };
    match (target.zero, point, zero) {
        (Zero::Symmetric, Some(point), _) => Ok((target.middle() as i32 - point, None)),
        (Zero::Integer, Some(point), _) => {
            if point < 0 || point > target.max_code() as i32 + 1 {
                let expected = format!("zero points from 0 to {}", target.max_code() + 1);
                return Err(refuse(expected, point as f32, i, g));
            }
            Ok((0, Some(ZeroOf::Point(point))))
        }
        (Zero::Float, Some(point), _) => {
            let offset = -f64::from(scale) * f64::from(point);
            let held = target.scale.round(offset as f32);
            if f64::from(held) != offset {
                return Err(refuse(format!("scale · zero point exact in {}", target.scale), offset as f32, i, g));
            }
            Ok((0, Some(ZeroOf::Offset(held))))
        }
        (_, None, ZeroOf::Offset(offset)) => {
            if target.scale.round(offset) != offset {
                return Err(refuse(format!("offsets exact in {}", target.scale), offset, i, g));
            }
            Ok((0, Some(zero)))
        }
        (_, None, ZeroOf::Point(_)) => unreachable!("a point is never lost"),
    }
}

fn refuse(expected: String, got: f32, i: usize, g: usize) -> Error {
    Error::invalid(OP, expected, format!("{got} in row {i}, group {g}"))
}
