/*
The state of a rollout with an environment (trajectory.h): conversations of turns, the processes that answer them, and
the answers that a resumed run repeats.

A trajectory is one text that the model and its environment write in turns. Its tokens are a path. If a rendering does
not begin with the path's tokens, as when a template drops old reasoning, the next turn forks: the path keeps its
common beginning, and what followed is set aside as an earlier path. So all tokens of a trajectory, those of the
current path and what earlier paths had of their own, went through the model once: they are at most --seq-len + 1.
*/
#ifndef LLMC_TRAJECTORY_STATE_H
#define LLMC_TRAJECTORY_STATE_H
#include "llmc/base/json.h"
#include "reward.h"

#define ENVIRONMENT_ANSWER  ((size_t)1 << 20) // most bytes of an environment's answer
#define RENDER_ANSWER       ((size_t)1 << 22) // most bytes of a renderer's answer, besides its ids
#define ENVIRONMENT_WORKERS 64                // most processes of an environment
#define RANDOM_STREAM_FORKS 0x666f726b73ull   // stream of random.h for the seeds of forked texts ("forks")
#define TURN_STEPS          32                // tokens a text that are drawn before a text that was answered goes on

typedef struct {
    const char *command, *render; // --environment-command, NULL: no environment; the renderer's command
    size_t workers, max_turns;
    size_t tokens; // S: most rows of a trajectory, --seq-len
    double timeout;
    int own; // 1: each turn is trained with its own reward (--turn-rewards own)
} EnvironmentSettings;

// What a text waits for after a turn
typedef enum { WAITS_FOR_MESSAGE, WAITS_FOR_ANSWER, WAITS_FOR_RENDERING, TURN_READY, TURN_DONE } TurnStage;

typedef struct {
    size_t path, begin, tokens; // the drawn ids are [begin, begin + tokens) of path number `path`
    float reward;               // NAN: the environment gave none
    double advantage;
} AgentTurn;

// Path p is the first `kept` ids of path p + 1, then old[begin, begin + tokens)
typedef struct {
    size_t kept, begin, tokens;
} OldPath;

typedef struct {
    int32_t *ids, *old;  // [S + 1] the current path; what earlier paths had of their own
    uint16_t *old_route; // [S + 1,text_routes / S] experts of old[]; NULL: not recorded
    size_t tokens, old_tokens, all;
    AgentTurn *turn; // [max_turns]
    OldPath *path;   // [max_turns] earlier paths
    size_t turns, paths;
    char *row, *messages; // the prompt's columns, a JSON object; the members of the conversation's array. Owned
    TurnStage stage;
    size_t ended_at, ticket; // step of the sampler at which the last turn ended; order of waiting texts
    int truncated, failed;   // a limit ended it; its environment failed
    size_t errors;           // turns with a tool error
    double since, waited;    // s
} Trajectory;

// A process and the trajectory whose line it answers; SIZE_MAX: none
typedef struct {
    Reward process;
    size_t text;
    void *rollout; // the Rollout that has the trajectory
} Exchange;

// An answer that was recorded before a run was killed
typedef struct {
    size_t step, text, turn;
    uint64_t request; // checksum of the line that it answers
    char *answer;
} Recorded;

typedef struct {
    Trajectory *text;   // [P*G]
    Exchange *exchange; // [workers + 1] the environment's processes, then the renderer
    size_t *queue;      // [P*G] texts whose turn ended, in order
    size_t *ready;      // [P*G] texts that may go on, in order
    size_t queued, ready_count, texts, begun, tickets, step;
    double waited;      // seconds for which no text was written because all waited
    Reward failed;      // the last process that failed, for its message
    int has_failed;     // 1: a process failed in this step
    size_t *sequence;   // [P*G] sequence of each trajectory; SIZE_MAX: left out
    int record;         // file of answers, open to append; -1: none
    Recorded *recorded; // [recorded_count] answers of the steps after the checkpoint
    size_t recorded_count;
} Agents;

#endif
