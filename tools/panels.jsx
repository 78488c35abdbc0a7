/* Draws rows of the dashboard in Grafana's grid. Frames, titles, graphs, units and legends are Grafana's own components.

   `window.draw(board)` draws a board. It has `width` in pixels, `from` and `to` in milliseconds since 1970, and `rows`.
   A row has a `title` and its `panels` as in deploy/grafana/motet.json. Each panel also has its `series` from Prometheus,
   with `name`, `times` and `values`. */

import {
  FieldType,
  ThemeContext,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createTheme,
  dateTime,
  toDataFrame,
} from "@grafana/data";
import { GlobalStyles, PanelChrome, Text, TimeSeries } from "@grafana/ui";
import { flushSync } from "react-dom";
import { createRoot } from "react-dom/client";

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const MARGIN = 16;
const LEGEND = { showLegend: true, displayMode: "list", placement: "bottom", calcs: [] };

/** Grafana's defaults for a time series. */
const COLOUR = { mode: "palette-classic" };
const CUSTOM = {
  drawStyle: "line",
  lineInterpolation: "linear",
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: "none",
  axisGridShow: true,
};

const theme = createTheme({ colors: { mode: "dark" } });

const pixels = (cells) => cells * (CELL + GAP) - GAP;

/** Returns a data frame for each series, in the form of Grafana's Prometheus data source. Its name is the query's legend. */
function framesOf({ series, fieldConfig: { defaults } }) {
  const config = { color: COLOUR, ...defaults, custom: { ...CUSTOM, ...defaults.custom } };
  const data = series.map(({ name, times, values }) =>
    toDataFrame({
      fields: [
        { name: "Time", type: FieldType.time, values: times },
        { name: "Value", type: FieldType.number, values, config: { displayNameFromDS: name, ...config } },
      ],
    }),
  );
  const fieldConfig = { defaults: {}, overrides: [] };
  const frames = applyFieldOverrides({ data, fieldConfig, replaceVariables: (text) => text, theme, timeZone: "utc" });
  cacheFieldDisplayNames(frames);
  return frames;
}

function Graph({ panel, range, width, height }) {
  if (panel.type !== "timeseries") {
    return <Text color="secondary">Grafana publishes no component for a {panel.type}.</Text>;
  }
  if (panel.series.length === 0) {
    return <Text color="secondary">No data</Text>;
  }
  const legend = { ...LEGEND, ...panel.options?.legend };
  return (
    <TimeSeries
      frames={framesOf(panel)}
      timeRange={range}
      timeZone="utc"
      width={width}
      height={height}
      legend={legend}
    />
  );
}

function Panel({ panel, range, pageWidth, top }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (pageWidth + GAP) / COLUMNS;
  const at = { position: "absolute", left: x * column, top: (y - top) * (CELL + GAP) };
  return (
    <div style={at}>
      <PanelChrome title={panel.title} description={panel.description} width={w * column - GAP} height={pixels(h)}>
        {(width, height) => <Graph panel={panel} range={range} width={width} height={height} />}
      </PanelChrome>
    </div>
  );
}

function Row({ row, range, pageWidth }) {
  const top = Math.min(...row.panels.map((panel) => panel.gridPos.y));
  const bottom = Math.max(...row.panels.map((panel) => panel.gridPos.y + panel.gridPos.h));
  return (
    <>
      <div style={{ height: pixels(1), lineHeight: `${pixels(1)}px` }}>
        <Text variant="h5">{row.title}</Text>
      </div>
      <div style={{ position: "relative", height: pixels(bottom - top) + GAP }}>
        {row.panels.map((panel) => (
          <Panel key={panel.id} panel={panel} range={range} pageWidth={pageWidth} top={top} />
        ))}
      </div>
    </>
  );
}

window.draw = ({ width, from, to, rows }) => {
  const raw = { from: dateTime(from), to: dateTime(to) };
  const range = { ...raw, raw };
  const pageWidth = width - 2 * MARGIN;
  const root = createRoot(document.getElementById("board"));
  flushSync(() =>
    root.render(
      <ThemeContext.Provider value={theme}>
        <GlobalStyles />
        <div style={{ padding: MARGIN }}>
          {rows.map((row) => (
            <Row key={row.title} row={row} range={range} pageWidth={pageWidth} />
          ))}
        </div>
      </ThemeContext.Provider>,
    ),
  );
};
