//! Images and windows as kernels are told of them.

use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::parameters::parameters;
use crate::error::{Error, Result};

parameters! {
    /// As in `include/images.cuh`.
    #[derive(Debug)]
    pub(in crate::cuda) struct Images {
        batch: u64,
        height: u64,
        width: u64,
        rows: u64,
        columns: u64,
        kernel_rows: u32,
        kernel_columns: u32,
        channels: u32,
        outputs: u32,
        groups: u32,
        x_nhwc: u32,
        y_nhwc: u32,
        padding: u32,
        stride_down: u64,
        stride_across: u64,
        dilation_down: u64,
        dilation_across: u64,
        top: u64,
        left: u64,
    }
}

impl Images {
    /// Error: more channels or positions than 32 bits count.
    pub(in crate::cuda) fn new(op: &'static str, shape: &Conv2dShape, [x, y]: [Layout2d; 2]) -> Result<Self> {
        let g = shape.geometry();
        let narrow = |value: usize| {
            let fail = |_| Error::invalid(op, "fewer than 2³² channels and positions", value.to_string());
            u32::try_from(value).map_err(fail)
        };
        Ok(Self {
            batch: shape.batch() as u64,
            height: shape.input()[0] as u64,
            width: shape.input()[1] as u64,
            rows: shape.output()[0] as u64,
            columns: shape.output()[1] as u64,
            kernel_rows: narrow(g.kernel[0])?,
            kernel_columns: narrow(g.kernel[1])?,
            channels: narrow(g.channels())?,
            outputs: narrow(g.outputs())?,
            groups: narrow(g.groups)?,
            x_nhwc: (x == Layout2d::Nhwc).into(),
            y_nhwc: (y == Layout2d::Nhwc).into(),
            padding: 0,
            stride_down: g.stride[0] as u64,
            stride_across: g.stride[1] as u64,
            dilation_down: g.dilation[0] as u64,
            dilation_across: g.dilation[1] as u64,
            top: g.padding[0] as u64,
            left: g.padding[1] as u64,
        })
    }
}
